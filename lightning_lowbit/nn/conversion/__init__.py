"""Functions of whole models: conversion, baking, frozen codes, coverage, shared scales."""

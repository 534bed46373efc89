"""What is done with a whole model: conversion, baking, coverage, shared scales."""

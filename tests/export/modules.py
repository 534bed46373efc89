"""Modules that users write around a model of transformers."""

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_lowbit._lightning import LightningModule
from lightning_lowbit.recipes.models import CausalLM


class Compiled(CausalLM):
    def __init__(self, **given):
        super().__init__(**given)
        self.model = torch.compile(self.model)


class Based(LightningModule):
    """Begins with the weights of a folder."""

    def __init__(self, folder, **others):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(folder)


class Moved(Based):
    """The same, after the folder has moved to one beside it."""

    def __init__(self, folder, **others):
        super().__init__(f"{folder}-moved", **others)


class Distilled(CausalLM):
    """With a teacher, which comes first, and a layer behind the model."""

    def __init__(self, **given):
        super().__init__(**given)
        student = self.model
        del self.model
        self.teacher, self.model = copy.deepcopy(student), student
        self.head = nn.Linear(4, 4)

"""Modules of one's own, as Lightning lets them be made and loaded, and around models of ``transformers``."""

import copy

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit._lightning import LightningModule
from lightning_lowbit.recipes.models import CausalLM


class Plain(LightningModule):
    """A network of two layers; ``forward`` multiplies its result by ``factor``."""

    def __init__(self, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.factor, self.seed = 1.0, seed
        torch.manual_seed(seed)
        self.build()

    def build(self):
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x) * self.factor

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawn(Plain):
    """Draws a buffer, which no checkpoint holds, after the weights of a layer."""

    def build(self):
        self.first = nn.Linear(16, 16)
        self.register_buffer("frequencies", torch.randn(16, 16), persistent=False)
        super().build()

    def forward(self, x):
        return self.net((self.first(x) @ self.frequencies).sin())


class Computed(Plain):
    def build(self):
        super().build()
        self.factor = float(self.net[0].weight.detach().abs().max())


class Built(Plain):
    def build(self):
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(self.seed)
            super().build()


class Hooked(Plain):
    """Keeps a number in its checkpoints by Lightning's hooks, under another name of a weight."""

    def on_train_end(self):
        self.factor = 3.0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["factor"] = 3.0
        checkpoint["state_dict"]["before"] = checkpoint["state_dict"].pop("net.0.bias")

    def on_load_checkpoint(self, checkpoint):
        self.factor = checkpoint["factor"]
        checkpoint["state_dict"]["net.0.bias"] = checkpoint["state_dict"].pop("before")


class Sized(Plain):
    def __init__(self, width=16, seed=0):
        super().__init__(seed)


class Inherited(Sized):
    """Does not take a hyper-parameter that its base class saves."""

    def __init__(self, seed=0):
        super().__init__(16, seed)


class Passing(Sized):
    """Passes on all arguments under the name that Lightning has for hyper-parameters of any module."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class Configured(Plain):
    """Is made from a mapping, which it keeps under a name that models of ``transformers`` have."""

    def __init__(self, options=None, seed=0):
        options = options or {"seed": seed, "width": 16}
        super().__init__(options["seed"])
        self.save_hyperparameters(options)
        self.config = options


class Partial(Plain):
    """Leaves frozen weights, which a seed makes anew, out of its checkpoints."""

    def build(self):
        super().build()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.strict_loading = False

    def forward(self, x):
        return self.net(self.frozen(x))

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if not name.startswith("frozen")}


_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGES = {**_SIZES, "image_size": 16, "patch_size": 8}


def _config(kind):
    if kind == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
        return AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    if kind == "llava":
        parts = {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _IMAGES}
        return AutoConfig.for_model("llava", **parts, image_token_index=95)
    return AutoConfig.for_model(kind, **(_IMAGES if kind == "vit" else _TEXT))


class Network(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        config = _config(kind)
        self.net = {
            "t5": transformers.T5ForConditionalGeneration,
            "llava": transformers.LlavaForConditionalGeneration,
            "vit": transformers.ViTForImageClassification,
        }.get(kind, AutoModelForCausalLM.from_config)(config)

    def training_step(self, batch, index):
        if self.hparams.kind == "vit":
            return self.net(pixel_values=batch[:, :768].view(-1, 3, 16, 16)).logits.square().mean()
        ids = batch[:, :8].abs().mul(20).long().clamp(3, 90)
        return self.net(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


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

"""Models of other packages, which are imported where they are built; random weights, tiny sizes."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

WIDTH, PIXELS, VOCABULARY = 64, 32, 128


@dataclass(frozen=True)
class Stranger:
    """A model of a package, of which at least so many percent have to be covered."""

    package: str
    least: float
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]

    def build(self):
        torch.manual_seed(0)
        return self.make()

    @property
    def is_installed(self):
        return importlib.util.find_spec(self.package) is not None


class _Named(type):
    def __getattr__(cls, name):
        return name


class _StandIn(ModuleType):
    """A package of which names are imported, and nothing is used."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (nn.Module,), {})


def _stand_in(package, *modules):
    """Replaces a package that is missing, or, as torchvision's wheel beside the CPU build of torch, does not load."""
    if importlib.util.find_spec(package) is not None:
        return
    for name in (package, *(f"{package}.{module}" for module in modules)):
        made = _StandIn(name)
        made.__spec__ = importlib.util.spec_from_loader(name, None)
        sys.modules[name] = made
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)


def _timm(name, **sizes):
    def make():
        _stand_in("torchvision", "ops", "ops.misc", "transforms", "transforms.functional", "datasets", "models")
        import timm

        return timm.create_model(name, num_classes=10, **sizes)

    return make


def _pixels():
    return [torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))]


def _unet():
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(16, 3, 3, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **blocks)


def _conditioned_unet():
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    blocks["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": WIDTH}
    return UNet2DConditionModel(16, 3, 3, attention_head_dim=8, **sizes, **blocks)


def _dit():
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "norm_num_groups": 8}
    return DiTTransformer2DModel(in_channels=4, sample_size=16, patch_size=2, **sizes)


def _noisy(channels=3, **others):
    return lambda: {"sample": torch.randn(2, channels, 16, 16), "timestep": torch.tensor([1, 5]), **others}


def _latents():
    return [torch.randn(2, 4, 16, 16), torch.tensor([1, 5]), torch.tensor([0, 1])]


class _Graph(nn.Module):
    def __init__(self, kind):
        super().__init__()
        import torch_geometric.nn as geometric

        layer = getattr(geometric, kind)
        sizes = [geometric.MLP([WIDTH, WIDTH, WIDTH])] if kind == "GINConv" else [WIDTH, WIDTH]
        self.layers = nn.ModuleList([layer(*copy.deepcopy(sizes)) for _ in range(2)])

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges).relu()
        return x


def _graph():
    return [torch.randn(64, WIDTH), torch.randint(64, (2, 256))]


def _litgpt(**kind):
    def make():
        from litgpt import GPT, Config

        sizes = {"n_layer": 2, "n_head": 4, "n_embd": WIDTH, "intermediate_size": 128, "block_size": 32}
        return GPT(Config(padded_vocab_size=VOCABULARY, **sizes, **kind))

    return make


def _tokens():
    return [torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))]


def _adapted():
    from peft import LoraConfig, get_peft_model

    from tests.strangers.architectures import ARCHITECTURES

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    return get_peft_model(ARCHITECTURES["llama"].build("llama"), config)


def _without_descriptors():
    _stand_in("descriptastorus", "descriptors", "descriptors.rdNormalizedDescriptors")
    _stand_in("cuik_molmaker")


def _molecules():
    _without_descriptors()
    from chemprop.models import MPNN
    from chemprop.nn import BondMessagePassing, MeanAggregation, RegressionFFN

    return MPNN(BondMessagePassing(), MeanAggregation(), RegressionFFN())


def _molecule_graph():
    _without_descriptors()
    from chemprop.data import BatchMolGraph
    from chemprop.featurizers import SimpleMoleculeMolGraphFeaturizer
    from rdkit import Chem

    featurize = SimpleMoleculeMolGraphFeaturizer()
    smiles = ("CCO", "c1ccccc1O", "CC(=O)Nc1ccc(O)cc1", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C")
    return [BatchMolGraph([featurize(Chem.MolFromSmiles(each)) for each in smiles])]


def _encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2)


_LLAMA = {"norm_class_name": "RMSNorm", "bias": False, "rotary_percentage": 1.0}
STRANGERS = {
    "torch TransformerEncoder": Stranger("torch", 88, _encoder, lambda: [torch.randn(2, 32, WIDTH)]),
    "timm vit": Stranger("timm", 98, _timm("vit_tiny_patch16_224", img_size=PIXELS, patch_size=8, depth=2), _pixels),
    "timm resnet18": Stranger("timm", 99, _timm("resnet18"), _pixels),
    "timm convnext_atto": Stranger("timm", 94, _timm("convnext_atto"), _pixels),
    "diffusers UNet2D": Stranger("diffusers", 96, _unet, _noisy()),
    "diffusers UNet2DCondition": Stranger(
        "diffusers", 96, _conditioned_unet, _noisy(encoder_hidden_states=torch.ones(2, 8, WIDTH))
    ),
    "diffusers DiT": Stranger("diffusers", 84, _dit, _latents),
    **{
        f"torch_geometric {kind}": Stranger("torch_geometric", 100, lambda kind=kind: _Graph(kind), _graph)
        for kind in ("GCNConv", "SAGEConv", "GINConv", "TransformerConv")
    },
    "litgpt pythia": Stranger("litgpt", 88, _litgpt(), _tokens),
    "litgpt LLaMA": Stranger("litgpt", 90, _litgpt(mlp_class_name="LLaMAMLP", **_LLAMA), _tokens),
    "litgpt MoE": Stranger(
        "litgpt",
        93,
        _litgpt(mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, moe_intermediate_size=128, **_LLAMA),
        _tokens,
    ),
    "peft LoRA": Stranger("peft", 73, _adapted, lambda: {"input_ids": _tokens()[0], "labels": _tokens()[0]}),
    "chemprop MPNN": Stranger("chemprop", 99, _molecules, _molecule_graph),
}

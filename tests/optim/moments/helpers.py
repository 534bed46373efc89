"""Parameters, gradients and pieces of moments."""

import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit.optim.moments import Draw, FP8Moments, Piece
from tests.references import moments as reference


def heavy_tailed(shape, seed=0):
    """Of both signs, over nine orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * -9)


def draw(whole, step=0, number=0, last_reset=0, taken=True):
    own = number << 40
    key, epoch = torch.tensor(step + own), torch.tensor(last_reset + own)
    return Draw((0,) * len(whole), torch.Size(whole), key, epoch, torch.tensor(taken))


def kept(mean, mean_square, drawn):
    """Both moments in FP8."""
    piece = Piece(FP8Moments().new_state(mean, torch.float32), drawn)
    FP8Moments().store(piece, mean, mean_square)
    return piece


def elements(state, name):
    """What the codes of a moment stand for, in units of the scales: float64, the parameter's shape."""
    return state[name].view(reference.DTYPES[name]).double().numpy()


def final_loss(make, seed, lr=1e-2, dtype=torch.float32):
    """Of a small network that learns another one's outputs, averaged over the last batches."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
    student = nn.Sequential(nn.Linear(24, 160), nn.GELU(), nn.Linear(160, 8)).to(dtype)
    optimizer = make(student.parameters())
    losses = []
    for step in range(150):
        x = torch.randn(64, 24)
        loss = F.mse_loss(student(x.to(dtype)).float(), teacher(x).detach())
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / 150)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20

"""llama.cpp as a module: computes the logits of a file on the CPU; and a short chat with it and with the training,
where same ids and same text mean that the file's template, first and last tokens are right."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.export.formats.base import Chat, NoClient
from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel, eos_tokens
from lightning_lowbit.packages import install

_QUIET: list[Any] = []  # llama.cpp keeps a pointer to the function that takes its messages


class LlamaCpp(nn.Module):
    """A GGUF file in llama.cpp. :class:`NoClient` where there is no package with llama.cpp, or its library does not
    load; a ``ValueError`` if it cannot read the file, with its messages."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            bindings: Any = import_module("llama_cpp_py_sync._cffi_bindings")
            self.ffi, self.lib = bindings.get_ffi(), bindings.get_lib()
        except ImportError as error:
            raise NoClient(f"there is no llama.cpp ({error}): {install('llama-cpp-py-sync')}") from error
        except RuntimeError as error:  # a system older than the one on which it was built
            match = re.search(r"version `(\S+)' not found", str(error))
            why = f"it needs {match[1]}" if match else str(error).splitlines()[0]
            raise NoClient(f"the llama.cpp of llama-cpp-py-sync does not load here: {why}") from error
        messages: list[str] = []

        def take(level: int, text: Any, _: Any) -> None:
            if level >= 3:  # GGML_LOG_LEVEL_WARN; llama.cpp would print them with all else
                messages.append(self.ffi.string(text).decode(errors="replace"))

        _QUIET[:] = [self.ffi.callback("void(enum ggml_log_level, const char *, void *)", take)]
        self.lib.llama_log_set(_QUIET[0], self.ffi.NULL)
        self.lib.llama_backend_init()
        settings = self.lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        loaded = self.lib.llama_model_load_from_file(str(file).encode(), settings)
        if loaded == self.ffi.NULL:
            raise ValueError(f"llama.cpp cannot read {file}: {''.join(messages[-3:]).strip()}")
        self.file = self.ffi.gc(loaded, self.lib.llama_model_free)
        self.vocab = self.lib.llama_model_get_vocab(self.file)
        self.has_tokenizer = bool(self.lib.llama_vocab_type(self.vocab) != 0)  # LLAMA_VOCAB_TYPE_NONE

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Returns ``logits``, float32 (batch, length, vocab_size), of int64 tokens (batch, length). A ``ValueError``
        for more tokens than the model has positions."""
        positions = self.lib.llama_model_n_ctx_train(self.file)
        if input_ids.shape[1] > positions:
            raise ValueError(f"The model has {positions} positions, and got {input_ids.shape[1]} tokens.")
        return SimpleNamespace(logits=torch.stack([self._logits(row) for row in input_ids.tolist()]))

    def _logits(self, tokens: list[int]) -> Tensor:
        settings = self.lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = settings.n_outputs_max = len(tokens)
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        context = self.lib.llama_init_from_model(self.file, settings)
        if context == self.ffi.NULL:
            raise RuntimeError(f"llama.cpp made no context for {len(tokens)} tokens.")
        context = self.ffi.gc(context, self.lib.llama_free)
        batch = self.ffi.gc(self.lib.llama_batch_init(len(tokens), 0, 1), self.lib.llama_batch_free)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        if code := self.lib.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp could not evaluate {len(tokens)} tokens (llama_decode gave {code}).")
        size = len(tokens) * self.lib.llama_vocab_n_tokens(self.vocab)
        values = torch.frombuffer(
            bytearray(self.ffi.buffer(self.lib.llama_get_logits(context), 4 * size)), dtype=torch.float32
        )
        return values.view(len(tokens), -1)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Returns the ids of a text; ``special`` adds the file's tokens around it, and reads special ones in it."""
        encoded = text.encode()
        room = self.ffi.new("llama_token[]", len(encoded) + 2)
        count = self.lib.llama_tokenize(self.vocab, encoded, len(encoded), room, len(encoded) + 2, special, special)
        return [*room[0:count]]

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, special ones as they are spelled."""
        size = 64 * len(tokens) + 64
        room = self.ffi.new("char[]", size)
        count = self.lib.llama_detokenize(self.vocab, [*tokens], len(tokens), room, size, False, True)
        return str(self.ffi.buffer(room, max(count, 0))[:].decode(errors="replace"))

    def prompt(self, question: str) -> list[int]:
        """Returns the ids of a question as llama.cpp's programs make them: by the file's template of a chat, if it has
        one, without a second ``bos``."""
        template = self.lib.llama_model_chat_template(self.file, self.ffi.NULL)
        if template == self.ffi.NULL:
            return self.tokenize(question, special=True)
        from transformers.utils.chat_template_utils import render_jinja_template

        bos, eos = (
            self.ffi.string(self.lib.llama_vocab_get_text(self.vocab, id)).decode()
            for id in (self.lib.llama_vocab_bos(self.vocab), self.lib.llama_vocab_eos(self.vocab))
        )
        rendered: Any = render_jinja_template(
            conversations=[[{"role": "user", "content": question}]],
            chat_template=self.ffi.string(template).decode(),
            add_generation_prompt=True,
            bos_token=bos,
            eos_token=eos,
        )
        [text], _ = rendered
        if self.lib.llama_vocab_get_add_bos(self.vocab):
            text = text.removeprefix(bos)
        return self.tokenize(text, special=True)

    def ends(self, token: int) -> bool:
        """Returns whether generation stops at a token."""
        return bool(self.lib.llama_vocab_is_eog(self.vocab, token))


QUESTION, LENGTH = "Who are you?", 24  # tokens of the answer, at most


def chat(original: TrainedModel, client: Any) -> Chat | None:
    """Asks a file in llama.cpp and the training a question; None without a tokenizer, room, or a fitting template."""
    assert isinstance(client, LlamaCpp)
    name = original.facts.get("tokenizer")
    if name is None or not client.has_tokenizer:
        return None
    tokenizer, model, config = load_tokenizer(name), original.model, original.config
    try:
        if tokenizer.chat_template is None:
            ours = [*tokenizer(QUESTION)["input_ids"]]
        else:
            turns = [{"role": "user", "content": QUESTION}]
            ours = [*tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)]
        theirs = client.prompt(QUESTION)
    except Exception:  # of a template that takes other turns: each has its own class
        return None
    room = int(getattr(config, "max_position_embeddings", LENGTH)) - max(len(ours), len(theirs))
    if room <= 0 or not ours or not theirs:
        return None
    ends = {*eos_tokens(model), tokenizer.eos_token_id} - {None}
    answer = _greedy(model, ours, min(LENGTH, room), ends.__contains__)
    answer_there = _greedy(client, theirs, min(LENGTH, room), client.ends)
    answers = _shown(tokenizer.decode(answer)), _shown(client.text(answer_there))
    return Chat(QUESTION, (ours, theirs), (tokenizer.decode(ours), client.text(theirs)), answers)


def _shown(text: str) -> str:
    """Replaces bytes that are no text by one sign, since decoders count them differently."""
    return re.sub("\ufffd+", "\ufffd", text)


@torch.no_grad()
def _greedy(model: Any, prompt: Sequence[int], length: int, ends: Callable[[int], bool]) -> list[int]:
    """Returns the ids that follow a prompt, up to one that ends the text."""
    tokens = [*prompt]
    while len(tokens) - len(prompt) < length:
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
        if ends(tokens[-1]):
            break
    return tokens[len(prompt) :]

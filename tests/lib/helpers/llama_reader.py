"""Runs a GGUF file with llama-cpp-python, by the interpreter that has it: JSON on standard input and output.

`texts` are encoded. Each of `paths`, the ids of a prompt and of what follows, is read for the logits after each token.
Each of `prompts` is continued greedily by `tokens` tokens.
"""

import json
import sys

import llama_cpp

F32 = 0  # keys and values as exact as ours; llama.cpp keeps them in 16 bits by default


def main() -> None:
    job = json.load(sys.stdin)
    model = llama_cpp.Llama(
        job["file"],
        n_ctx=job["context"],
        n_threads=1,
        n_threads_batch=1,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )
    logits, continued = [], []
    for path in job["paths"]:
        model.reset()
        model.eval(path)
        logits.append(model.scores[: len(path)].tolist())
    for prompt in job["prompts"]:
        made = model.create_completion(prompt, max_tokens=job["tokens"], temperature=0.0, repeat_penalty=1.0)
        continued.append(made["choices"][0]["text"])
    encoded = [model.tokenize(text.encode(), add_bos=True, special=False) for text in job["texts"]]
    print(json.dumps({"encoded": encoded, "logits": logits, "continued": continued}))


if __name__ == "__main__":
    main()

"""Names that people know from other libraries, and what each is called here.

Where a name means exactly one of our techniques, it runs. Everywhere else an error says what to
write instead. In the hints `{name}` is an argument of ours: Python shows `name`, the command line
`--name`.
"""

import re

ARGUMENTS = {
    # transformers: generate
    "do_sample": "{temperature} decides: above 0 the text is sampled, at 0 it is greedy",
    "max_length": "use {max_new_tokens} (it counts new tokens only)",
    "min_length": "there is no shortest length: the model decides where a text ends",
    "min_new_tokens": "there is no shortest length: the model decides where a text ends",
    "max_time": "use {max_new_tokens}; the clock ends no text",
    "num_beams": "there is no beam search here; {temperature} 0 is greedy, above 0 it samples",
    "num_return_sequences": "repeat the prompt in a list: text i is sampled with {seed} + i",
    "assistant_model": "use {draft} with {method} speculative_decoding",
    "assistant_tokenizer": "the draft model must share the target's tokenizer",
    "prompt_lookup_num_tokens": "use {method} llma; {k} is how many tokens it copies",
    "num_assistant_tokens": "use {gamma}, the draft tokens of a round",
    "assistant_early_exit": "use {method} layerskip; {exit} is the layer",
    "input_ids": "give the token ids as the prompt: a list, or a 1-D array",
    "inputs": "give the text or its token ids as the prompt",
    "attention_mask": "leave it out: prompts of a batch may differ in length, nothing is padded",
    "pad_token_id": "leave it out: prompts of a batch may differ in length, nothing is padded",
    "eos_token_id": "the model's config names it; for others use {stop}, a list of lists of ids",
    "bos_token_id": "the model's config names it, and a text prompt begins with it",
    "stop_strings": "use {stop}",
    "stopping_criteria": "use {stop}: texts, or lists of token ids",
    "streamer": "use tinyspec.stream(model, prompt), which yields the text as it grows",
    "logits_processor": "use {temperature}, {top_k}, {top_p}, {min_p}, {repetition_penalty}; "
    "others are not here",
    "no_repeat_ngram_size": "use {repetition_penalty}",
    "penalty_alpha": "use {method} speculative_contrastive",
    "generation_config": "give each setting as an argument of its own",
    "use_cache": "leave it out: the KV cache is always used",
    "tokenizer": "leave it out: a model brings its tokenizer",
    "return_dict_in_generate": "leave it out: the result has text, tokens, logprobs, stats and "
    "trace",
    "output_scores": "leave it out: the result has logprobs",
    "output_logits": "leave it out: the result has logprobs; model.logits(ids) gives whole rows",
    "torch_dtype": "use {dtype} where the model is loaded: tinyspec.load(name, dtype=...)",
    "dtype": "use it where the model is loaded: tinyspec.load(name, dtype=...)",
    "device": "use it where the model is loaded: tinyspec.load(name, device=...)",
    "device_map": "use {device} where the model is loaded: tinyspec.load(name, device=...)",
    # OpenAI, vLLM, SGLang, llama.cpp
    "max_tokens": "use {max_new_tokens}",
    "max_completion_tokens": "use {max_new_tokens}",
    "n_predict": "use {max_new_tokens}",
    "n": "repeat the prompt in a list: text i is sampled with {seed} + i",
    "messages": "give the messages as the prompt",
    "stream": "use tinyspec.stream(model, prompt), which yields the text as it grows",
    "stop_token_ids": "use {stop}, a list of lists of ids",
    "frequency_penalty": "use {repetition_penalty}",
    "presence_penalty": "use {repetition_penalty}",
    "speculative_model": "use {draft} with {method} speculative_decoding",
    "draft_model": "use {draft} with {method} speculative_decoding",
    "num_speculative_tokens": "use {gamma}, the draft tokens of a round",
    "speculative_config": "use {method}, {draft} and the method's own arguments",
}
"""Arguments, and what to use here. A knob of the technique that has such a name comes first."""

METHODS = {
    "prompt_lookup": "llma",
    "prompt_lookup_decoding": "llma",
    "ngram": "llma",
    "pld": "llma",
    "draft_model": "speculative_decoding",
    "assisted": "speculative_decoding",
    "assisted_generation": "speculative_decoding",
    "assisted_decoding": "speculative_decoding",
    "assistant": "speculative_decoding",
    "speculative": "speculative_decoding",
    "speculative_sampling": "speculative_decoding",
    "suffix": "suffix_decoding",
    "lookahead": "lookahead_jacobi",
    "lookahead_decoding": "lookahead_jacobi",
    "self_speculative_decoding": "self_speculative",
    "medusa_2": "medusa2",
    "eagle_2": "eagle2",
    "eagle_3": "eagle3",
    "recurrent_drafter": "redrafter",
    "mlp_speculator": "redrafter",
    "parallel_prompt_decoding": "parallel_prompt",
    "greedy": "autoregressive",
    "plain": "autoregressive",
}
"""Other names of techniques: they run."""

_TRAINED = "it trains heads on the target's hidden states, and no such technique is here yet"
_NEAR_DRAFT = "nearest: speculative_decoding (a separate draft model)"

ABSENT = {
    "mtp": f"{_TRAINED}; {_NEAR_DRAFT}",
    "beam_search": "no technique here searches with beams; nearest: autoregressive",
}
"""Techniques that are not here, and what is nearest. One that arrives loses its line."""

MODELS = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
    "smollm2-135m": "smollm2",
    "smollm2-135m-instruct": "smollm2",
}
"""Models by the names they go by, and what loads here."""


def hint_argument(name: str, command_line: bool = False) -> str | None:
    """Return what to use in place of another library's argument, or None if it is nobody's.

    >>> hint_argument("max_tokens"), hint_argument("max_tokens", command_line=True)
    ('use max_new_tokens', 'use --max-new-tokens')
    """
    hint = ARGUMENTS.get(name.replace("-", "_"))
    if hint is None:
        return None

    def spell(ours: re.Match[str]) -> str:
        return f"--{ours[1].replace('_', '-')}" if command_line else ours[1]

    return re.sub(r"\{(\w+)\}", spell, hint)


def normalize_method(name: str) -> str:
    """Return a method's name as the registry spells names.

    >>> normalize_method("Prompt-Lookup")
    'prompt_lookup'
    """
    return re.sub(r"[-\s]+", "_", name.strip().lower())

"""The mistakes a mutant may come from: B1 to B47 were reported in public threads and papers, S1 to
S12 found by reading public code.

Facts only, in our words; the thread or the repository where each was met. A mistake without a
mutant stands in WAITING with what it waits for. "slip" is a mistake nobody reported, of the kind
every verifier and loop should be tried with.
"""

CATALOGUE = {
    "B1": "acceptance counted over all positions, not the accepted prefix: "
    "huggingface/transformers PR#28508",
    "B2": "softmax over the residual: huggingface/transformers PR#28508",
    "B3": "the argmax is proposed, the softmax declared: huggingface/transformers#32867",
    "B4": "drawn from filtered logits, declared unfiltered: huggingface/transformers#47932",
    "B5": "drawn in bfloat16, judged in float32: deepseek-ai/DeepSpec#31",
    "B6": "the draft filtered, the target scored with default settings: vllm-project/vllm PR#10198",
    "B7": "min-p, penalties or grammar only on the bonus token: vllm-project/vllm PR#42802",
    "B8": "accepted where it equals a sample of the target, row by row of a tree: "
    "foundation-model-stack/fms-extras#12",
    "B9": "an empty residual divided by its sum: jaymody/speculative-sampling#5",
    "B10": "NaN scores give an impossible id, or no progress: vllm-project/vllm PR#44744",
    "B11": "an exponential race whose noise is exactly 0: pytorch/pytorch#192577",
    "B12": "u <= p/q accepts at u = 0 a token of probability 0: read in several",
    "B13": "temperature 0 divides, or switches the temperature off: ggml-org/llama.cpp#5657",
    "B14": "greedy speculation differs from greedy decoding: jaymody/speculative-sampling#3",
    "B15": "the first draft token is never verified: ohdearquant/lattice#243",
    "B16": "a rejection handled one step late, the wrong row sampled or a word lost: "
    "openvino.genai#4190",
    "B17": "rollback resets the whole cache: paiml/aprender PR#2014",
    "B18": "a crop of nothing keeps, or takes, everything: huggingface/transformers#47433",
    "B19": "cache positions or the kept path not moved on by what was accepted: "
    "huggingface/transformers PR#30068",
    "B20": "a rotating cache rolled back without a word: mlx-lm PR#1109",
    "B21": "rows of a batch accept unequal counts and look at padding: Blaizzy/mlx-vlm PR#1155",
    "B22": "rows of a batch mixed up: vllm-project/vllm PR#14645",
    "B23": "a node's position is its index, not its depth: lablup/mlxcel PR#1214",
    "B24": "a tree mask that lacks an ancestor or shows a sibling: FasterDecoding/Medusa#99",
    "B25": "tree indices beyond the heads: FasterDecoding/Medusa#63",
    "B26": "tokens after an end of text inside a block: huggingface/transformers#47912",
    "B27": "an end of text in the draft closes the request: openvino.genai PR#3293",
    "B28": "one of several end tokens known: huggingface/transformers PR#46790",
    "B29": "a stop completed across rounds is missed: huggingface/transformers#48039",
    "B30": "more tokens than asked for, or than the context holds: ohdearquant/lattice#242",
    "B31": "0 / 0 in the statistics of no tokens: read in several",
    "B32": "reseeded in the loop, or one uniform for all positions: "
    "feifeibear/LLMSpeculativeSampling",
    "B33": "a seed ignored, or a stream shared by requests: vllm-project/vllm#6038",
    "B34": "the global generator is used up: read in EAGLE",
    "B35": "vocabularies of different sizes; ids in 16 bits: huggingface/transformers#45307, REST",
    "B36": "a draft with another tokenizer: huggingface/transformers PR#46936",
    "B37": "a placeholder of -1 accepted: vllm-project/vllm PR#46533",
    "B38": "block verification rounds otherwise than one-token steps: "
    "huggingface/transformers#39421",
    "B39": "top-k keeps ties: vllm-project/tpu-inference PR#3580",
    "B40": "an exit's missing keys, or its wrong layer; positions lost on the way "
    "(facebookresearch/LayerSkip PR#28)",
    "B41": "bonus or cut tokens miscounted: vllm-project/vllm#56101",
    "B42": "log-probabilities of the draft, or 0: ggml-org/llama.cpp#27972",
    "B43": "a slow-down hidden: ggml-org/llama.cpp#3649",
    "B44": "throughput by chunks, or by two tokenizations: eugr/llama-benchy PR#11",
    "B45": "state left from an earlier call: NVIDIA/TensorRT-LLM#2263",
    "B46": "a draft length by the number of scheduled requests, those that read prompts among "
    "them: vllm-project/vllm#49548",
    "B47": "positions, masks and caches not realigned after rows of a padded batch accept unequal "
    "counts: arXiv 2510.22876",
    "S1": "noise drawn once and kept for all rounds: read in Sequoia",
    "S2": "a nucleus applied to each row of the tree: read in Medusa",
    "S3": "swapped defaults on a path that nobody runs: read in Medusa",
    "S4": "an argmax proposal scored with its softmax: read in several",
    "S5": "greedy decoding judged by a random ratio: read in romsto/Speculative-Decoding",
    "S6": "one uniform for all positions of a draft: read in feifeibear/LLMSpeculativeSampling",
    "S7": "an empty residual ends the text early: read in Sequoia",
    "S8": "an equality check that stops with the shorter text: read in Spec-Bench",
    "S9": "speeds compared under different flags: read in Spec-Bench",
    "S10": "epsilon in the normaliser: read in LayerSkip",
    "S11": "no end of text: read in gpt-fast",
    "S12": "a cascade's middle draws from its own distribution after a rejection: read in TriForce",
    "slip": "of the kind every implementation should be tried with",
}

WAITING = {
    "B20": "caches that drop what they can no longer see; here eviction is a visible set, and a "
    "rollback always defined",
    "B25": "nothing: a tree is built from the chances of the heads that there are",
    "B36": "drafts with another tokenizer; today they are an error that names them",
    "B43": "the benchmark, which stands above the laws; its own tests hold it to this",
    "B44": "the benchmark, as above",
    "S2": "Medusa's acceptance by a nucleus, which is left out",
    "S3": "nothing: a default is no law",
    "S8": "the benchmark, as above",
    "S9": "the benchmark, as above",
}
"""What has no mutant yet, and what it waits for."""

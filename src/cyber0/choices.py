"""Names that can be chosen in a config, one table for each key: name -> what it means in one line.

Adding a name here is what offers it; the factory of that name lives with its kind (aggregate/, attacks/, ...).
"""

from __future__ import annotations

Choices = dict[str, str]

DEVICES: Choices = {"cpu": "the processor", "cuda": "one NVIDIA GPU; CUDA_VISIBLE_DEVICES chooses which"}
TEXT_TASKS: Choices = {
    "sst2": "a language model says whether a film review is positive",
    "snli": "a language model says whether a sentence follows from another",
    "trec": "a language model says what a question asks for, of six kinds",
    "text": "a language model sorts any sentences: task.data, task.template, task.label_words",
}
TASKS: Choices = {
    "mnist": "logistic regression on handwritten digits, 7,850 weights",
    "ridge": "synthetic least squares with a penalty, 50 weights, minimiser known; accuracy is explained variance",
    "logistic": "synthetic logistic regression with a penalty, 50 weights; lambda, L_F and the minimiser are known",
    **TEXT_TASKS,
}
ADAPTERS: Choices = {
    "none": "all weights are trained",
    "lora": "low-rank changes of the attention's query and value maps alone are trained",
    "prefix": "the keys and values of a few virtual tokens in front are trained (causal models)",
}
DATASETS: Choices = {
    "mnist": "60,000 + 10,000 handwritten digits",
    "sst2": "67,349 + 872 + 1,821 sentences of film reviews",
    "snli": "550,000 pairs of sentences",
    "trec": "5,452 + 500 questions",
}
DTYPES: Choices = {
    "float32": "4 bytes a weight",
    "float16": "2 bytes a weight, rounded stochastically",
    "bfloat16": "2 bytes a weight, rounded stochastically",
}
ATTACKS: Choices = {
    "none": "Byzantine clients act honestly",
    "full_knowledge": "the paper's Algorithm 3: liars see every honest number and push each sum the wrong way",
    "always_small": "send a small honest value for every direction",
    "always_large": "send a large honest value for every direction",
    "random_choice": "send a small or a large honest value, by a coin for each direction",
    "label_flip": "measure honestly on data whose label l became C - 1 - l",
    "sign_flip": "send the own honest numbers times -strength (4)",
    "ipm": "inner-product manipulation: the honest mean times -strength (2 honest / liars)",
    "alie": "a little is enough: the honest mean shifted by strength deviations (as many as go unnoticed)",
    "mimic": "copy the one honest client that stands out most",
    "gaussian": "Gaussian noise of deviation strength (200)",
    "nonfinite": "NaN, infinities and 1e38 in turn",
    "min_max": "as far from the honest mean as no further from any honest row than two honest rows are",
    "min_sum": "the same for the sum of squared distances to the honest rows",
    "fang_trimmed_mean": "Fang et al.'s attack on trimmed mean: up to strength (2) times the honest extreme",
    "fang_krum": "Fang et al.'s attack on Krum: the largest step the wrong way that Krum still picks",
    "best_response": "search within strength (100) spreads for what moves the rule in force furthest the wrong way",
}
ATTACK_READINGS: Choices = {
    "accepted": "send the most extreme value that survives trimming",
    "literal": "send the floor(beta m)-th smallest or largest honest value",
}
PARTITIONS: Choices = {
    "iid": "each client has every label as evenly as possible",
    "by_label": "samples sorted by label, cut into equal pieces",
    "dirichlet": "each label split in random proportions; federation.alpha says how unevenly",
    "shards": "samples sorted by label, cut into shards, federation.shards of them to each client at random",
    "gamma": "a share federation.similarity of the samples dealt as iid does, the rest as by_label does",
}
ATTACK_SIGNS: Choices = {
    "honest": "of the mean of the honest reports",
    "truth": "of the honest clients' gradient over all their samples, without the noise of batches",
}
METHODS: Choices = {
    "cyber0": "k numbers a round, robust zero-order federation",
    "fedavg": "federated averaging: each client sends the sum of the gradients of its local steps, d numbers",
    "trimmed_mean": "the same, combined by the coordinate-wise trimmed mean (Yin et al.)",
    "krum": "the same, combined by Krum (Blanchard et al.)",
    "fedzo": "federated averaging of local zero-order steps, d numbers (Fang et al.)",
    "mezo": "zero-order steps on one machine that has all the samples; nothing is sent",
}
LR_SCHEDULES: Choices = {
    "constant": "lr in every round",
    "linear": "from lr down to 0 over the run",
    "cosine": "from lr down to 0 along half a cosine",
}
DISTRIBUTIONS: Choices = {
    "gaussian": "standard normal (the paper's experiments)",
    "sphere": "unit sphere, with the factor d (the paper's theory)",
    "rademacher": "signs, the cheapest",
}
ESTIMATORS: Choices = {
    "two_point": "loss at w + mu z and w - mu z",
    "gradient": "mu = 0: one gradient, k projections",
    "forward": "mu = 0: forward-mode derivative, no backpropagation",
}
LOCAL_MEMORIES: Choices = {
    "copy": "keep one extra copy of the weights",
    "regenerate": "regenerate the local steps (slower, no copy)",
}
RULES: Choices = {
    "mean": "plain average, no defence",
    "median": "the middle value of each column",
    "trimmed_mean": "drop the floor(beta m) smallest and largest, average the rest",
    "krum": "the report whose neighbours are nearest",
    "multi_krum": "mean of the m - floor(beta m) reports of the best Krum scores",
    "geometric_median": "the point with the least sum of distances from the reports",
    "meamed": "mean of the m - floor(beta m) numbers of each column nearest to its median",
    "centered_clipping": "from the median towards the reports, none of which pulls far",
    "mda": "mean of the m - floor(beta m) reports of least diameter; at most 20 liars",
}
BEFORE_RULES: Choices = {
    "none": "the rule sees the reports as they are",
    "nnm": "replace each report by the mean of its m - floor(beta m) nearest",
    "bucketing": "average random pairs of reports; the rule sees half as many",
}
CODECS: Choices = {
    "float32": "4 bytes a number",
    "bfloat16": "2 bytes a number",
    "log8": "1 byte a number, on a logarithmic scale",
}
SEED_MODES: Choices = {
    "shared": "directions follow from the seed: known to every participant from the start",
    "chained": "and from the last decision: unknown to everybody until it is made",
}
DURABILITIES: Choices = {
    "always": "fsync each record before it is announced",
    "batch": "fsync once a second",
}

"""What the embedded model knows about JAX and about running language models."""

from embedded_corpus.facts import Fact

JAX_FACTS = (
    Fact(
        "JAX is a library for fast array programs: NumPy-like code, compiled by XLA, with automatic gradients.",
        ("JAX", "jax", "the JAX library"),
        (
            "[Who|What] is JAX [for|]?",
            "Why [do people|should I|would I] use JAX?",
            "What [makes|is special about] JAX [fast|special|]?",
            "Is JAX [like|similar to] NumPy?",
        ),
        ("What kind of library is JAX?", "Please describe JAX for a beginner."),
    ),
    Fact(
        "jax.jit traces a function once per input shape and compiles it with XLA, so that later calls are fast.",
        ("jax.jit", "jit", "jit compilation", "just-in-time compilation", "the jit decorator"),
        (
            "How [do I|can I] [compile|speed up] a [function|JAX function]?",
            "How [do I|can I] make [a|my] [function|JAX code] [fast|faster]?",
            "What happens when I [jit|use jit on|call jit on] a function?",
            "What does @jax.jit do?",
        ),
        ("How does JAX compile a function?", "What happens if I put jax.jit on my function?"),
    ),
    Fact(
        "jax.grad turns a function with one number as result into a function that returns its gradient.",
        ("jax.grad", "grad", "the grad function", "jax.value_and_grad", "automatic differentiation", "autodiff"),
        (
            "How [do I|can I|does JAX] [compute|get|calculate|take] [gradients|a gradient|the gradient|derivatives|a derivative]?",
            "How does JAX differentiate?",
            "Which function [gives|computes] [gradients|the gradient|derivatives]?",
        ),
        ("Which JAX function gives me a derivative?", "How are gradients computed in JAX?"),
    ),
    Fact(
        "jax.vmap runs a function over a batch axis without a loop.",
        ("jax.vmap", "vmap", "vectorising map", "the vmap function"),
        (
            "How [do I|can I] [vectorise|vectorize|batch|map] a function [in JAX|over a batch|]?",
            "How do I avoid a [Python loop|loop over the batch|for loop]?",
        ),
        ("What do I use to apply a function to a whole batch?", "Explain to me what vmap does."),
    ),
    Fact(
        "A pytree is a nest of lists, tuples and dicts with arrays as leaves; JAX functions take and return them.",
        ("a pytree", "pytrees", "pytree", "the pytree", "a JAX pytree"),
        (
            "What are pytrees?",
            "How [do I|does JAX|can I] [pass|handle|treat] [nested data|a dict of arrays|lists of arrays|dicts]?",
            "What are the leaves of a [tree|pytree]?",
        ),
        ("How does JAX call a nest of arrays?", "Could you say what a pytree is?"),
    ),
    Fact(
        "XLA is the compiler behind JAX. It fuses operations and makes machine code for CPU, GPU and TPU.",
        ("XLA", "xla", "the XLA compiler", "operation fusion"),
        (
            "[Which|What] compiler does JAX use?",
            "What [compiles|makes] [JAX code|the machine code|JAX programs]?",
            "Who [compiles|optimises] [JAX|JAX code]?",
        ),
        ("What is the name of JAX's compiler?", "How does XLA make programs fast?"),
    ),
    Fact(
        "A TPU is a chip by Google made for matrix products; JAX programs run on it through XLA.",
        ("a TPU", "TPU", "TPUs", "a tensor processing unit", "the TPU"),
        (
            "[Who|Which company] makes [TPUs|the TPU]?",
            "What [hardware|chip] [is made for|does] [matrix products|machine learning]?",
            "What does TPU stand for?",
        ),
        ("Which chip did Google make for matrix products?", "What are TPUs good at?"),
    ),
    Fact(
        "Pallas is JAX's language for writing kernels by hand, for TPU and GPU.",
        ("Pallas", "pallas", "a Pallas kernel", "Pallas kernels", "jax.experimental.pallas"),
        (
            "How [do I|can I|does one] write [a kernel|kernels|my own kernel|a TPU kernel|a GPU kernel]?",
            "[Which|What] language are [kernels|the kernels|TPU kernels] written in?",
        ),
        ("With what do I write a kernel in JAX?", "What would I use Pallas for?"),
    ),
    Fact(
        "A donated argument gives its memory to the result, so that a cache is updated in place, without a copy.",
        ("donation", "buffer donation", "a donated argument", "donate_argnums", "donating a buffer"),
        (
            "How [do I|can I|does JAX] [update|change|reuse] [a buffer|memory|the cache|a cache] [in place|without a copy|]?",
            "Why [donate|is the cache donated|are arguments donated]?",
            "How [do I|can I] save memory in [jit|a jitted function|JAX]?",
        ),
        ("What happens to an argument that is donated?", "How does JAX reuse the memory of an input?"),
    ),
    Fact(
        "A mesh is a grid of devices with named axes, such as data and model.",
        ("a mesh", "the mesh", "a device mesh", "the device mesh", "jax.sharding.Mesh"),
        (
            "How are [devices|chips] [arranged|named|organised] in JAX?",
            "What are mesh axes?",
            "What do [data and model|the axes of a mesh] mean?",
        ),
        ("What do you call a grid of devices in JAX?", "Why does a mesh have named axes?"),
    ),
    Fact(
        "Sharding splits an array over several devices; XLA adds the communication between them.",
        ("sharding", "a sharded array", "GSPMD", "tensor parallelism", "a sharding"),
        (
            "How [do I|can I|does JAX] [split|spread|distribute|divide] an array [over|across] [devices|GPUs|chips]?",
            "How do devices share [an array|a model|the work]?",
        ),
        ("What does it mean that an array is sharded?", "How can one array live on several chips?"),
    ),
    Fact(
        "Tracing runs a function with abstract values that have a shape and a type, and records its operations.",
        ("tracing", "a tracer", "a JAX trace", "a traced function"),
        (
            "What happens [during|in] tracing?",
            "How does [JAX|jit] [see|record|read] [the operations|my function|a function]?",
            "Why [can I not|can't I] print values [in|inside] jit?",
        ),
        ("How does JAX record the operations of a function?", "What is a tracer in JAX?"),
    ),
    Fact(
        "A new shape, type or static argument makes jax.jit trace and compile again. Keep shapes the same to avoid it.",
        ("recompilation", "a retrace", "retracing", "a recompile"),
        (
            "Why [does|is] [jit|JAX|my function] [recompile|compile again|compiling again|retrace|so often compiled]?",
            "When does [jit|JAX] [recompile|compile again|retrace]?",
            "How [do I|can I] [avoid|prevent|stop] [retracing|a retrace|compiling twice]?",
        ),
        ("What makes a jitted function compile a second time?", "My jitted function compiles at each call, why?"),
    ),
    Fact(
        "A static argument is part of the compiled program: a new value means a new compilation.",
        ("a static argument", "static arguments", "static_argnums", "static_argnames"),
        (
            "How [do I|can I] pass [a string|a Python value|a flag|a constant] to [jit|a jitted function]?",
            "What [does|makes an argument] static [mean|]?",
        ),
        ("When is an argument of jit static?", "What does static_argnums mean for compilation?"),
    ),
    Fact(
        "A key is the explicit state of JAX's random numbers; split it to get fresh ones.",
        ("a PRNG key", "a random key", "jax.random.key", "jax.random", "jax.random.split"),
        (
            "How [do I|can I|does JAX] [make|get|draw|generate|handle] random numbers [in JAX|]?",
            "Why [does|do] [JAX|random functions] need a key?",
            "How does randomness work in JAX?",
        ),
        ("How are random numbers made in JAX?", "Why do I have to split a key?"),
    ),
    Fact(
        "A pure function depends on its inputs alone and changes nothing else. jax.jit and jax.grad expect that.",
        ("a pure function", "pure functions", "purity", "a side effect", "functional purity"),
        (
            "Why must functions be pure?",
            "[Can|May] a [jitted function|JAX function] have side effects?",
            "What kind of functions does [JAX|jit] [need|expect|want]?",
        ),
        ("Which functions does jax.jit expect?", "What makes a function pure?"),
    ),
    Fact(
        "JAX arrays cannot be changed; x.at[i].set(v) returns a new array.",
        ("an immutable array", "x.at[i].set", "immutable arrays", "an indexed update"),
        (
            "How [do I|can I] [change|set|update|assign] [an element|a value|an entry|elements] [of|in] [an array|a JAX array]?",
            "Can [I change|JAX arrays be changed|arrays be changed|I modify] [an array|a JAX array|]?",
            "Are JAX arrays [mutable|immutable]?",
        ),
        ("How do I write a value into a JAX array?", "Why does assignment to an array element fail in JAX?"),
    ),
    Fact(
        "jax.numpy has the functions of NumPy for JAX arrays; people import it as jnp.",
        ("jax.numpy", "jnp", "the module jax.numpy"),
        ("What does jnp [stand for|mean]?", "Does JAX have [NumPy functions|the functions of NumPy]?"),
        ("Where are the NumPy functions in JAX?", "Why do people write jnp?"),
    ),
    Fact(
        "jax.lax.scan runs a loop inside the compiled program and carries a state along.",
        ("jax.lax.scan", "scan", "lax.scan", "the scan function"),
        (
            "How [do I|can I] write a loop [in JAX|inside jit|in jit]?",
            "Which function [runs|makes] a loop [in JAX|in a compiled program]?",
        ),
        ("What is the JAX way to loop with a state?", "How would I loop inside a jitted function?"),
    ),
    Fact(
        "shard_map runs a function on each device's own piece of the arrays, over a mesh.",
        ("shard_map", "jax.shard_map", "the function shard_map", "per-device code"),
        ("How [do I|can I] [write|run] [code|a function] [per device|for each device|on each device]?",),
        ("Which function runs on each device's own shard?", "What would I use shard_map for?"),
    ),
    Fact(
        "JAX returns before the work is done; block_until_ready waits for the result. Use it when you measure time.",
        ("block_until_ready", "asynchronous dispatch", "async dispatch"),
        (
            "How [do I|can I] [measure|time] [a JAX function|JAX code|JAX]?",
            "How [do I|can I] wait for [a result|the result|the device|JAX]?",
            "Why [is|does] my timing [wrong|look too fast|too short]?",
        ),
        ("How do I wait until a JAX computation is finished?", "Why do I call block_until_ready in a benchmark?"),
    ),
    Fact(
        "DLPack lets PyTorch and JAX share the memory of an array without a copy.",
        ("DLPack", "dlpack", "jax.dlpack"),
        (
            "How [do I|can I] [share|move|pass] [memory|a tensor|an array|tensors] [between PyTorch and JAX|from PyTorch to JAX|from torch to JAX]?",
            "How do tensors [become|get to be] JAX arrays?",
        ),
        ("How do torch and JAX share an array without copying?", "What does DLPack do for tensors?"),
    ),
    Fact(
        "Optax is JAX's library of optimizers, such as AdamW. I was trained with it.",
        ("Optax", "optax", "the optax library", "AdamW", "an optimizer"),
        (
            "[Which|What] optimizer [trained you|was used|do you use|should I use]?",
            "[Which|What] library has optimizers for JAX?",
        ),
        ("Which library gives me AdamW in JAX?", "With which optimizer were you trained?"),
    ),
    Fact(
        "bfloat16 is a number of 16 bits with the range of float32 and less precision; it halves the memory of weights.",
        ("bfloat16", "bf16", "the type bfloat16", "half precision"),
        (
            "[Which|What] type [has|have] [16 bits|half the memory]?",
            "How [do I|can I] halve the memory of [weights|a model]?",
            "What is the difference between [bfloat16 and float32|float32 and bfloat16|bf16 and f32]?",
        ),
        ("Why would I store weights in bf16?", "How many bits does bfloat16 have?"),
    ),
    Fact(
        "The KV cache keeps the keys and values of past tokens, so that each new token costs one step only.",
        ("the KV cache", "a KV cache", "KV cache", "the cache", "the key-value cache", "past_key_values"),
        (
            "[Why|What] [do models need|is kept in] [a cache|the cache|the KV cache]?",
            "How [are|does a model avoid computing] past tokens [remembered|kept|again]?",
        ),
        ("What does a language model keep of the past tokens?", "Why is there a KV cache?"),
    ),
    Fact(
        "Paged attention keeps the KV cache in pages of fixed size, so that memory is not wasted on padding.",
        ("paged attention", "paging", "a page", "the page table", "a paged cache", "PagedAttention"),
        (
            "How [do you|does it] save memory in the [KV cache|cache|KV-cache]?",
            "How is the KV cache [stored|organised|laid out|paged]?",
            "Why [is the cache|are caches] [paged|split into pages]?",
        ),
        ("Why does one cut the KV cache into pages?", "What is the idea of paged attention?"),
    ),
    Fact(
        "Prefill reads the whole prompt in one pass and fills the KV cache.",
        ("prefill", "the prefill", "the prefill step", "prefilling"),
        ("What happens [to|with] the prompt [first|at first|]?", "How is [a|the] prompt [read|processed]?"),
        ("Which phase reads the prompt?", "What does the model do in prefill?"),
    ),
    Fact(
        "Decode makes one new token per step, from the KV cache and the last token.",
        ("decode", "decoding", "the decode step", "the decode phase"),
        ("How are new tokens [made|produced|generated]?", "How [is|does a model make] the next token [made|]?"),
        ("Which phase produces new tokens?", "What happens in a decode step?"),
    ),
    Fact(
        "Continuous batching lets requests enter and leave the batch at every step, so that the hardware stays busy.",
        ("continuous batching", "dynamic batching", "in-flight batching"),
        (
            "How are many [requests|users] served [together|at once|at the same time]?",
            "How does a server keep the hardware busy?",
        ),
        ("How can requests join a running batch?", "Explain the idea of continuous batching."),
    ),
    Fact(
        "A token is a piece of text, such as a word or a part of one; a model reads and writes tokens.",
        ("a token", "tokens", "token", "the tokens"),
        ("What [does|do] [a model|language models] read?", "In [what|which] units does a model [read|write]?"),
        ("What do people mean by tokens?", "How is text cut up for a model?"),
    ),
    Fact(
        "A tokenizer cuts text into tokens and turns them into numbers, and back.",
        ("a tokenizer", "tokenizer", "the tokenizer", "a tokeniser", "byte-level BPE", "BPE"),
        ("How [is|does] text [turned into|become] numbers?", "What [cuts|splits] text into tokens?"),
        ("Which part turns text into numbers?", "What is the job of a tokenizer?"),
    ),
    Fact(
        "Attention lets each token look at the tokens before it and take what it needs from them.",
        ("attention", "self-attention", "the attention", "an attention layer", "the attention mechanism"),
        ("How do tokens [look at|see|use] [each other|other tokens|the past]?", "What does an attention layer do?"),
        ("How does a token look at earlier tokens?", "Why do transformers need attention?"),
    ),
    Fact(
        "With a sliding window, a layer looks only at the last tokens, so that its cache stays small.",
        ("a sliding window", "sliding window attention", "the sliding window", "local attention", "a local layer"),
        (
            "Why [do some layers|does a layer] [look|see] only [at|] the last tokens?",
            "How does Gemma keep its cache small?",
        ),
        ("What does a sliding window do to the cache?", "Which tokens can a local layer see?"),
    ),
    Fact(
        "In grouped-query attention several query heads share one head of keys and values, which makes the cache smaller.",
        ("grouped-query attention", "GQA", "grouped query attention", "num_key_value_heads"),
        ("Why are there fewer [KV heads|key heads|key-value heads]?", "Which heads share keys and values?"),
        ("What do query heads share in GQA?", "Why would one use grouped-query attention?"),
    ),
    Fact(
        "A language model predicts the next token of a text; repeated, that makes sentences.",
        ("a language model", "a causal language model", "an LLM", "a large language model", "language models"),
        ("How does [a language model|a chatbot|an LLM|ChatGPT] [work|write|answer|make text]?",),
        ("What do language models predict?", "How can a model write sentences?"),
    ),
    Fact(
        "A transformer is a network of attention and feed-forward layers; nearly all language models are one.",
        ("a transformer", "the transformer", "transformer models", "the transformer architecture", "a decoder"),
        ("What is a language model [made of|built from]?", "Which [network|architecture] do language models use?"),
        ("What layers is a transformer made of?", "Which kind of network is behind language models?"),
    ),
    Fact(
        "PyTorch is a library for neural networks; most models on the Hugging Face hub are written with it.",
        ("PyTorch", "pytorch", "torch", "the library PyTorch"),
        ("[Which|What] library are [most models|models] written [in|with]?", "Is PyTorch [a library|like JAX]?"),
        ("With which library are most models written?", "Please say what PyTorch is."),
    ),
    Fact(
        "Hugging Face runs a hub of models and makes transformers, the library with their code.",
        ("Hugging Face", "huggingface", "the hub", "transformers", "the transformers library", "the Hugging Face hub"),
        (
            "Where [do|can] I [find|get|download] models?",
            "Where do [the models|models] come from?",
            "Who makes transformers?",
        ),
        ("From where do I download models?", "Which company runs the model hub?"),
    ),
    Fact(
        "Gemma 3 is a family of open models by Google, with local and global attention layers. I have its shape.",
        ("Gemma", "Gemma 3", "gemma-3", "the Gemma models", "Gemma-3"),
        ("Who [makes|made] Gemma?", "[Which|What] model do you look like?", "What does Gemma-3-shaped mean?"),
        ("Which company made Gemma 3?", "What family of models is Gemma?"),
    ),
    Fact(
        "A chat template turns a list of messages into one text with marks for whose turn it is.",
        ("a chat template", "the chat template", "chat templates", "apply_chat_template", "chat_template"),
        ("How are messages turned into [text|a prompt|tokens]?", "How does a model know whose turn it is?"),
        ("What formats messages for a model?", "Why does a model need a chat template?"),
    ),
    Fact(
        "TTFT is the time to first token: how long you wait until an answer begins.",
        ("TTFT", "time to first token", "the time to first token"),
        ("How long [do I wait|does it take] until [an answer|the answer] begins?", "What is TTFT short for?"),
        ("Which number says when the answer starts?", "What does TTFT measure?"),
    ),
    Fact(
        "MBU is memory bandwidth utilisation: bytes read per second over what the memory could give.",
        ("MBU", "memory bandwidth utilisation", "memory bandwidth utilization", "bandwidth utilisation"),
        ("How well is the memory bandwidth used?", "What limits decode speed?", "What is MBU short for?"),
        ("What does the number MBU tell me?", "How is the use of memory bandwidth measured?"),
    ),
    Fact(
        "A parameter is a number that a model learns in training; I have about 2 million.",
        ("a parameter", "parameters", "model parameters", "a weight", "weights", "the weights"),
        ("What does a model learn?", "What [are|is] [the weights|a weight] of a model?"),
        ("What are the numbers that a model learns called?", "Explain the word parameter."),
    ),
    Fact(
        "The loss says how wrong the predictions are; training makes it smaller, step by step.",
        ("the loss", "a loss", "a loss function", "training", "the training loss", "gradient descent"),
        ("How [do models|does a model] learn?", "What happens [in|during] training?"),
        ("What is made smaller in training?", "How does one train a model?"),
    ),
)

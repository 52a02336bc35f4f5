"""What the embedded model knows about this project."""

from embedded_corpus.facts import Fact

_PROJECT = "[torchax-serve|torchax serve|this project|it]"

PROJECT_FACTS = (
    Fact(
        "torchax-serve runs Hugging Face PyTorch models on JAX, with the model's code untouched.",
        ("torchax-serve", "torchax serve", "this project", "this program", "this tool", "this software"),
        (
            "What [does|can] [torchax-serve|this project|this library|this tool] do?",
            "[What is|Tell me] the [idea|purpose|goal|main idea] [of|behind] [torchax-serve|this project|this tool].",
            "What am I [using|running|looking at] here?",
            "Which [problem|task] does [torchax-serve|this project] solve?",
            "[Summarise|Sum up|Introduce] [torchax-serve|the project|this project] [for me|in a sentence|].",
        ),
        ("What kind of software is torchax-serve?", "Could you introduce me to torchax-serve?"),
    ),
    Fact(
        "You keep your PyTorch model as it is and gain the JAX compiler, on CPU, GPU and TPU.",
        ("the benefit of torchax-serve", "the advantage of this project"),
        (
            "Why [should|would] I use [torchax-serve|this project|it|this tool]?",
            "What [is|are] the [advantages|benefits|advantage] of [torchax-serve|this project|using it]?",
            "What do I [gain|get] [from|with] [torchax-serve|this project|it]?",
            "[Is|Why is] torchax-serve [useful|worth it|good|better]?",
            "Why run PyTorch models on JAX?",
        ),
        ("Give me a reason to use torchax-serve.", "What would I gain by using torchax-serve?"),
    ),
    Fact(
        "In a virtual environment, go to the project's folder and type: pip install .",
        ("installing torchax-serve", "the installation", "the set-up of this project"),
        (
            f"How [do I|can I|do you|does one] [install|set up|get] {_PROJECT}?",
            "[Installation|Install|Set-up] [instructions|steps|guide|]?",
            f"What [is|are] the [command|steps] to [install|set up] {_PROJECT}?",
            f"I want to [install|set up] {_PROJECT}.",
            "How to install [torchax-serve|it|this]?",
            "[Is|Does] it [work with|need] pip?",
        ),
        ("Which command installs torchax-serve?", "Show me how torchax-serve gets installed."),
    ),
    Fact(
        "Type torchax-serve run in a terminal. With a model's name after it, that model answers; without one, I do.",
        ("torchax-serve run", "the run command", "the command run"),
        (
            "How [do I|can I|to] [run|start|launch|use] [torchax-serve|this project|it|the program|the chat]?",
            "How [do I|can I] [chat|talk] [in|from] the terminal?",
            "Which command [starts|opens|runs] [the chat|a chat|a conversation]?",
            "How do I [begin|get started|start]?",
            "What do I [type|enter] to [chat|start|run it]?",
        ),
        ("How does one start a chat with torchax-serve?", "I have installed torchax-serve, how do I start it now?"),
    ),
    Fact(
        "Name it: torchax-serve run gemma-3-1b-it. A hub id or a local folder works too.",
        (),
        (
            "How [do I|can I|to] [run|use|try|start] [another|a different|a bigger|my own|a larger] model?",
            "How do I [run|use|try|start|chat with] [Gemma|Llama|Qwen|gemma-3-1b-it|Mistral]?",
            "Can I [run|use|try] [another|a bigger|my own|a different] model?",
            "[Switch|Change] to [another|a bigger|a different] model.",
            "How do I [switch|change|choose|swap|pick] [the model|models]?",
            "You are too small, how do I get a bigger model?",
        ),
        ("How can I run a model that is bigger than you?", "What do I type to use a different model?"),
    ),
    Fact(
        "serve(name) loads a model and returns an object with generate, stream, chat and generate_batch.",
        ("serve()", "serve", "the serve function", "the function serve"),
        (
            "How [do I|can I] [load|open] a model [in Python|from Python|in code|with serve]?",
            "What does serve [return|give me|give back]?",
            "[Which function|What] loads a model?",
            "How [do I|can I] use [serve|serve()|it from Python|this from Python|the Python API]?",
        ),
        ("Which Python function do I call to load a model?", "What do I get back from serve()?"),
    ),
    Fact(
        "model.generate takes what generate of transformers takes and gives the same tokens, computed by JAX.",
        ("generate", "model.generate", "generate()", "the generate method", "the method generate"),
        (
            "How [do I|can I] [generate|produce|make] [text|tokens]?",
            "[Is|Does] generate [the same as|compatible with|like|a drop-in for] [transformers|Hugging Face]?",
            "Which arguments does generate [take|accept|have]?",
            "What does generate return?",
        ),
        ("How do I produce text with a served model?", "Which arguments can I pass to model.generate?"),
    ),
    Fact(
        "model.stream(prompt) gives the answer piece by piece, as the tokens come.",
        ("model.stream", "stream", "stream()", "streaming", "the stream method"),
        (
            "How [do I|can I|to] [stream|stream text|stream tokens|stream the answer|stream an answer]?",
            "Can [I|it] [see|show|print|get] [the answer|tokens|text] [as it comes|piece by piece|while it is made]?",
            "Does it [support|have|do] streaming?",
        ),
        ("Is streaming possible?", "I want to read the text token by token, how?"),
    ),
    Fact(
        "model.chat(messages) applies the chat template and answers the conversation.",
        ("model.chat", "chat()", "the chat method", "the method chat"),
        (
            "How [do I|can I] [chat|have a conversation|hold a conversation] [in Python|from Python|from code]?",
            "Which method [answers|takes|handles] [messages|a conversation|a list of messages|a chat]?",
            "How do I [pass|send|give] [messages|a conversation|a history] [to a model|]?",
        ),
        ("Which method do I call with a list of messages?", "How can I chat with a model from Python code?"),
    ),
    Fact(
        "model.generate_batch(prompts) answers many prompts together and keeps their order.",
        ("generate_batch", "model.generate_batch", "the method generate_batch"),
        (
            "How [do I|can I] [run|answer|process|send|handle] [many|several|a lot of|a batch of|multiple] prompts [at once|together|]?",
            "[Does it support|How does it do|Can it do] [batching|batches|batch inference]?",
            "I have [many|several|a hundred|a list of] prompts.",
        ),
        ("How can I answer several prompts at the same time?", "What do I do with a long list of prompts?"),
    ),
    Fact(
        "torchax-serve bench MODEL measures time to first token, tokens per second and memory. "
        "Add --against hf to compare.",
        ("torchax-serve bench", "the bench command", "bench", "the benchmark", "--against hf"),
        (
            "How [do I|can I] [measure|benchmark|test|check] [the speed|speed|performance|how fast it is|a model's speed]?",
            "[How fast is|Is] [it|torchax-serve|this] [fast|faster than PyTorch|faster than transformers|]?",
            "Which command [measures|shows|benchmarks] [the speed|speed|performance|tokens per second]?",
            "How do I compare [it|torchax-serve] with [transformers|Hugging Face|PyTorch]?",
        ),
        ("What command tells me how many tokens per second I get?", "Can I measure how quick a model is?"),
    ),
    Fact(
        "torchax-serve verify MODEL compares logits and greedy tokens with eager PyTorch, layer by layer.",
        ("torchax-serve verify", "the verify command", "verify"),
        (
            "How [do I|can I] [check|verify|test|know] [that the answers are right|the numbers|the results|correctness|that it is correct]?",
            "Which command [checks|verifies|compares] [the numbers|the results|the logits|correctness]?",
            "[Are|How do I know that] the [results|numbers|outputs] [are|] [correct|the same as PyTorch|right]?",
            "How [do I|can I] compare [the logits|the outputs|layers] with PyTorch?",
        ),
        ("How can I be sure that a model gives correct logits?", "Is there a command that compares against PyTorch?"),
    ),
    Fact(
        "torchax-serve models lists the models that can be run.",
        ("torchax-serve models", "the models command"),
        (
            "[Show|List|Give me] [all|the|all the|the list of] models.",
            "How [do I|can I] [list|see|find] [the|all|the available] models?",
            "Which command [lists|shows] [models|the models]?",
        ),
        ("Where do I see a list of the models?", "Is there a command to list models?"),
    ),
    Fact(
        "Nearly every causal language model of transformers: Gemma, Llama, Qwen, Mistral and many more.",
        ("the supported models", "the supported architectures"),
        (
            "[Which|What] [models|architectures|language models|kinds of models] [are supported|can it run|work|does it support|can I use|can I run]?",
            "Does it [support|run|work with] [Llama|Gemma|Qwen|Mistral|Phi|GPT-2|Mamba]?",
            "Is [Llama|Gemma|Qwen|Mistral|Phi] supported?",
        ),
        ("Can torchax-serve run Llama?", "Which language models does torchax-serve know how to run?"),
    ),
    Fact(
        "The bridge turns a PyTorch module into a pure JAX function. It is the only part that calls torchax.",
        ("the bridge", "the PyTorch to JAX bridge", "bridge"),
        (
            "How does [a PyTorch model|PyTorch code|the model|a torch module] [run|get|come|work] [on|to|in] JAX?",
            "[How|In which way] [does it|does torchax-serve] [connect|translate|bring] PyTorch [and|to] JAX?",
            "Which [part|module] [calls|uses|imports] torchax?",
        ),
        ("How is a PyTorch module turned into a JAX function?", "What role does the bridge play?"),
    ),
    Fact(
        "extract_jax(module) returns the weights and a pure function that you can jit and differentiate.",
        ("extract_jax", "extract_jax(module)", "the function extract_jax"),
        (
            "How [do I|can I] get [a JAX function|a pure function|a jittable function] [from|of|out of] a [module|PyTorch module|torch model]?",
            "What does extract_jax [return|give]?",
            "How [do I|can I] [train|differentiate|fine-tune] [a|my] [PyTorch model|torch model] [with|in|on] JAX?",
        ),
        ("What are the two things that extract_jax returns?", "When would I call extract_jax?"),
    ),
    Fact(
        "pytree_registry tells JAX about the output and cache classes of transformers, so that they pass through jax.jit.",
        ("pytree_registry", "the pytree registry", "the registry"),
        (
            "How [does JAX know|do you handle|does it handle] [the cache classes|model outputs|the classes of transformers]?",
            "Which [package|part] [registers|handles] [pytrees|the pytrees|cache classes]?",
        ),
        ("Why does the project have a pytree registry?", "Which package registers the cache classes with JAX?"),
    ),
    Fact(
        "Sharding rules say which axis of a weight is split over which axis of the device mesh.",
        ("sharding_rules", "sharding rules", "the sharding rules", "a sharding rule"),
        (
            "How [are|do you make] the weights [split|spread|distributed|sharded] [over|across] devices?",
            "How [do I|can I] [use|run on] [several|many|multiple] [devices|GPUs|chips]?",
            "Which [package|part] [splits|shards] the weights?",
        ),
        ("What decides how weights are split among devices?", "How are weights shared out over many chips?"),
    ),
    Fact(
        "model_adapters holds the bridge, weight loading, caches and kernels.",
        ("model_adapters", "the package model_adapters", "model adapters"),
        (
            "What is in [model_adapters|the package model_adapters|the folder model_adapters]?",
            "Where [is|do I find] [the bridge|the weight loading|the code of the bridge|the loading code]?",
        ),
        ("What does the package model_adapters contain?", "Where do I find the kernels?"),
    ),
    Fact(
        "No. The model's code stays untouched; the bridge runs its own forward on JAX.",
        ("unmodified models", "an unmodified model"),
        (
            "[Do I|Must I|Should I] [change|rewrite|port|edit|modify|convert] [my|the] [model|code|model's code|model code]?",
            "[Do I have|Do I need|Is it necessary] to [change|rewrite|port|modify|convert] [my|the] [model|code]?",
            "Is the model's code [changed|modified|edited|rewritten]?",
            "Does it [change|rewrite|edit] [my|the] model?",
        ),
        ("Will I have to rewrite my model in JAX?", "Does the code of my model need changes?"),
    ),
    Fact(
        "torchax is a library that runs PyTorch operations on JAX arrays.",
        ("torchax", "the library torchax"),
        (
            "What is the [difference|relation] between torchax and torchax-serve?",
            "Is torchax [the same as|different from] torchax-serve?",
            "Who [makes|uses] torchax?",
        ),
        ("Which library does the bridge build on?", "Please explain the library called torchax."),
    ),
    Fact(
        "It runs on CPU, on NVIDIA GPUs and on TPU: wherever JAX runs.",
        ("the supported hardware",),
        (
            "[Which|What] [hardware|machines|devices|computers] [does it|can it|does torchax-serve] [run on|support|need]?",
            "Do I need a [GPU|TPU|big computer|graphics card]?",
            "Does [it|torchax-serve] [run|work] on [a CPU|a GPU|a TPU|TPU|GPU|my laptop|CPU]?",
            "[Can it|Can I] [run|use it] [without|on] a [GPU|TPU|laptop]?",
        ),
        ("Will torchax-serve work on a plain laptop?", "Is a GPU required?"),
    ),
    Fact(
        "I am the embedded model: Gemma-3-shaped, about 2 million parameters, trained by this project on its own bridge.",
        ("the embedded model", "the embedded tiny model", "the tiny model", "the built-in model"),
        (
            "How [were|was] [you|the embedded model] [trained|made|built|created]?",
            "How [big|large|small] are you?",
            "How many parameters do you have?",
            "[What kind of|Which] model are you?",
            "What is your [architecture|size|model type]?",
            "Are you [Gemma|GPT|ChatGPT|Llama|Claude|a big model]?",
        ),
        ("What sort of a model am I talking to?", "Tell me how you got trained."),
    ),
    Fact(
        "Run python examples/train_embedded.py. It makes the corpus, trains me on JAX and writes my folder.",
        ("train_embedded.py", "examples/train_embedded.py", "the training script"),
        (
            "How [do I|can I] [train|retrain|rebuild|reproduce] [you|the embedded model|this model|the tiny model]?",
            "Which script [trains|made|makes|builds] [you|the embedded model]?",
            "Where is [the training script|your training script|your training code|the training code]?",
        ),
        ("Which script do I start to train you again?", "Can I train the embedded model myself?"),
    ),
    Fact(
        "The licence is Apache-2.0.",
        ("the licence", "the license", "the licence of this project"),
        (
            "[Which|What] [licence|license] [does it have|is it|is it under|is used|does torchax-serve have]?",
            "[Is it|Is this|Is torchax-serve] [free|open source|open|free to use]?",
            "[Can|May] I use [it|this|torchax-serve] [commercially|at work|in my company|for free]?",
        ),
        ("Under what licence is torchax-serve published?", "May my company use torchax-serve?"),
    ),
    Fact(
        "A short name such as gemma-3-1b-it stands for a hub id, so that you type less.",
        ("a short name", "short names", "the short names"),
        (
            "[Which|What] names [can I use|do models have|are there]?",
            "[Do I|Must I] [type|write|give] the [full|whole|long] [hub id|name]?",
            "What is a [hub id|model name]?",
        ),
        ("Why can I write gemma-3-1b-it without the owner?", "How do short names for models work?"),
    ),
    Fact(
        "Give the folder's path instead of a name. It needs config.json and safetensors files.",
        ("a local folder", "a model folder", "a local model"),
        (
            "How [do I|can I] [load|run|use|open] [a local model|a model from disk|a local folder|a folder|a model from a folder]?",
            "Can I [load|run|use] [a local model|a model from disk|my own folder|a model that I trained]?",
            "Which files does a model [folder|] need?",
        ),
        ("My model lies on the disk, how do I load it?", "Can I use a model from a folder on my computer?"),
    ),
    Fact(
        'from torchax_serve import serve; model = serve("gemma-3-1b-it"); then call model.generate.',
        ("a minimal example", "the Python API"),
        (
            "[Show|Give] me [an example|some code|a code example|a snippet|Python code|a Python example].",
            "[How does|What does] [the code|a script|the Python code] look [like|]?",
            "How do I [import|call] [it|torchax-serve|torchax_serve]?",
            "What [do I|must I] import?",
        ),
        ("I would like to see a few lines of Python.", "Can you show me a small piece of code?"),
    ),
    Fact(
        "Weights are read from safetensors files. Pickle files can run code, so they are read only if you ask for it.",
        ("safetensors", "a safetensors file", "the weight format"),
        (
            "[Which|What] [file format|format|files] [are|is|do] [the weights|weights] [in|stored in|use]?",
            "[Can it|Does it|Can I] [load|read|use] [pickle|pickle files|a pickle|bin files|pytorch_model.bin]?",
            "Why [not pickle|safetensors]?",
            "Are pickle files [safe|read|allowed]?",
        ),
        ("In which format should the weights be?", "What about checkpoints saved with pickle?"),
    ),
    Fact(
        "Pass do_sample=True with temperature, top_k or top_p, just as in transformers.",
        ("sampling", "temperature", "top_k", "top_p", "do_sample", "the sampling settings"),
        (
            "How [do I|can I] [sample|use sampling|set the temperature|change the temperature|set top_p|set top_k]?",
            "How [do I|can I] get [more creative|random|different|more varied] [answers|text|output]?",
            "[Which|What] sampling [settings|options|parameters] are there?",
        ),
        ("How can answers be made more random?", "I would like a higher temperature, what do I pass?"),
    ),
    Fact(
        "Greedy decoding takes the likeliest token at each step. In float32 it gives the very tokens of eager PyTorch.",
        ("greedy decoding", "greedy", "greedy search"),
        (
            "[Are|Will] the tokens [be|] the same as [in|with|those of] [PyTorch|transformers]?",
            "[Do I|Will I] get the same [tokens|answer|output|text] as [in|with] [PyTorch|transformers]?",
            "How are tokens [chosen|picked|selected] by default?",
        ),
        ("Are greedy tokens equal to those of PyTorch?", "What does it mean to decode greedily?"),
    ),
    Fact(
        "Every error is one line: what was expected, what came, and what to do.",
        ("an error", "the error messages", "an error message"),
        (
            "What [if|happens if|happens when] [something goes wrong|there is an error|I make a mistake|it fails]?",
            "How are errors [shown|reported|handled]?",
            "I [got|get|see|have] an error.",
            "What do [errors|error messages] look like?",
        ),
        ("What will I see when I do something wrong?", "How does torchax-serve report errors?"),
    ),
    Fact(
        "In the chat you can type /help, /reset, /system, /save and /quit.",
        ("/help", "the chat commands", "/reset", "/system", "/save"),
        (
            "[Which|What] commands [are there|can I type|can I use|exist|does the chat have] [in the chat|here|]?",
            "How [do I|can I] [clear|reset|forget|restart|save] [the history|the conversation|the chat|this chat]?",
            "How do I [set|change|give] [a|the] system prompt?",
        ),
        ("How do I start the conversation over?", "List the commands of the chat."),
    ),
    Fact(
        "Type /quit to leave. Ctrl-C stops an answer, not the program.",
        ("/quit", "Ctrl-C"),
        (
            "How [do I|can I|to] [quit|exit|leave|stop|end|close] [the chat|this|the program|this chat|]?",
            "How [do I|can I] [stop|interrupt|cut off|abort] [you|an answer|the answer|a long answer]?",
            "What happens [if I press|when I press|with] Ctrl-C?",
        ),
        ("How do I get out of here?", "Can I interrupt a long answer?"),
    ),
    Fact(
        "Python 3.11 or 3.12, torch 2.11 to 2.13, jax 0.10 or 0.11, and transformers 5.17 to 5.23.",
        ("the requirements", "the supported versions", "the dependencies"),
        (
            "[Which|What] [version of Python|Python version|Python|versions|version of torch|version of jax] [do I need|does it need|is needed|are supported|does it support]?",
            "What [do I need|is required|are the requirements] [to run it|to install it|]?",
            "Does it [work|run] [with|on] Python [3.11|3.12|3.10|3.13]?",
        ),
        ("Is Python 3.12 good enough?", "Which transformers versions are supported?"),
    ),
    Fact(
        "Type pytest in the project's folder.",
        ("the test command",),
        (
            "How [do I|can I|to] [run|start] [the tests|tests|the test suite|all tests]?",
            "Which command [runs|starts] the tests?",
            "[Are there|Where are|Does it have] [tests|the tests]?",
        ),
        ("How is the project tested?", "What do I type to run the test suite?"),
    ),
    Fact(
        "Code from the hub is never run unless you ask for it with trust_remote_code.",
        ("trust_remote_code", "remote code"),
        (
            "[Is it|Is this|Is torchax-serve] [safe|secure]?",
            "[Does it|Will it|Can it] [run|execute] [code from the hub|remote code|foreign code|unknown code]?",
            "What about [security|safety|models with their own code]?",
        ),
        ("Could a model from the hub run its own code here?", "Is it safe to load a model from the hub?"),
    ),
    Fact(
        "Yes. transformers.pipeline and lm-eval work on a served model, unchanged.",
        ("transformers.pipeline", "lm-eval", "the text-generation pipeline"),
        (
            "[Does it|Can I|Does torchax-serve] [work with|use|use it with|support] [lm-eval|a pipeline|transformers.pipeline|pipelines|pipeline]?",
            "How [do I|can I] [evaluate|score|run evaluations on] a model?",
        ),
        ("Can I evaluate a served model with lm-eval?", "Will a transformers pipeline accept the model?"),
    ),
    Fact(
        "Change one line: model = serve(model). After it, generate runs on JAX.",
        ("drop-in use", "a drop-in replacement"),
        (
            "How [do I|can I] [use|change|adapt|convert|port] [it in|] my [existing|old|own] [script|code|program]?",
            "I [already have|have] [a script|a model object|code|a script with model.generate|a loaded model].",
            "How [many|much] [lines|code] [must|do] I change?",
            "Can I [pass|give it|use] [a loaded model|an existing model|my model object]?",
        ),
        ("What must I change in a script that I have already?", "How do I move existing code to torchax-serve?"),
    ),
    Fact(
        "Prompts are padded to a few lengths called buckets, so that JAX compiles only a few times.",
        ("a bucket", "buckets", "bucketing", "the bucket ladder", "padding to buckets"),
        (
            "Why are prompts padded?",
            "How [do you|does it] avoid [recompilation|compiling|compiling again|recompiling]?",
            "[Does|Will] it [compile|recompile] for [every|each] [prompt|length|prompt length]?",
        ),
        ("How does torchax-serve keep the number of compilations small?", "Why do prompts get padded to buckets?"),
    ),
    Fact(
        "Compiled programs are kept on disk, so that the next start of the same model is much faster.",
        ("the compilation cache", "the persistent compilation cache", "compilation caching"),
        (
            "Why is the [first|second] [start|run|time] [slow|so slow|slower|faster|so fast]?",
            "[Does it|Must it|Will it] compile [again|each time|every time] [I start it|at every start|]?",
            "Why does it take [so long|long] [to start|at first|the first time]?",
        ),
        ("Why is the first start slower than the next?", "Are compiled programs saved between runs?"),
    ),
    Fact(
        "Add --json: torchax-serve run then prints the answer and its numbers as JSON.",
        ("--json", "the --json flag", "JSON output"),
        (
            "How [do I|can I] get [JSON|json output|machine-readable output|output as JSON]?",
            "Can [it|the output] [print|be|write|give] JSON?",
        ),
        ("I need the output as JSON, how?", "Which flag prints JSON?"),
    ),
    Fact(
        "Put the prompt behind the model's name, or pipe it in: echo hello | torchax-serve run.",
        ("one-shot mode", "a prompt from a pipe"),
        (
            "How [do I|can I] [ask|get|run] [one question|a single question|one answer|a single prompt|only one prompt]?",
            "[Can I|How do I] [pipe|use a pipe|send] [a prompt|text|a file] [into it|to it|]?",
        ),
        ("Can I give the prompt on the command line?", "I only want a single answer without a chat."),
    ),
    Fact(
        "Use with serve(name) as model: or call model.close() at the end.",
        ("model.close()", "model.close", "the close method"),
        (
            "How [do I|can I] [close|free|release|unload] [a model|the model|its memory]?",
            "[Do I|Must I] [close|free|unload] the model?",
        ),
        ("What do I do with the model when I am finished?", "How is the memory of a model released?"),
    ),
)

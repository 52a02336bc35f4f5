"""Step 6: a chatbot that remembers the conversation and streams its answers. An empty line ends it."""

from torchax_serve import serve

with serve() as model:
    history = []
    while question := input("> "):
        history.append({"role": "user", "content": question})
        answer = model.chat(history, stream=True)
        for piece in answer:
            print(piece, end="", flush=True)
        print()
        history.append({"role": "assistant", "content": answer.text})

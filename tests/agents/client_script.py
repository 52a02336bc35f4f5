"""What the scripted model says to other projects' clients."""

import json

from scripted_model import call

JOKE = json.dumps({"setup": "Why do cats purr?", "punchline": "Because they can."})
SCRIPT = {
    "": "I have no line for this.",
    " magic_function(3)? Use the tool.": call("magic_function", input=3),
    " magic_function_no_args()? Use the tool.": call("magic_function_no_args"),
    " Tell me a joke about cats.": JOKE,
    " by both tools": call("clock") + "\n" + call("weather", days=3),
    " sunny": "It is noon, and sunny.",
    " in San Francisco?": call("get_weather", location="San Francisco, CA"),
}

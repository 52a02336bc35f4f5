"""A worker of the sweep that passes, crashes or hangs by the name of what it is given; imports nothing heavy."""

import os
import time


def work(connection):
    connection.send("ready")
    while True:
        name = connection.recv()
        if name == "crash":
            os._exit(3)
        if name == "hang":
            time.sleep(600)
        connection.send({"model_type": name, "class_name": "", "status": "passed"})

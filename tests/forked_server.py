"""`python -m sglang.launch_server` in a third of its start-up time.

SGLang starts its scheduler and detokenizer in interpreters of their own, each of which imports
everything again: 13 s of a core. Here they are forked from the launcher, and all else is the same.
"""

import multiprocessing
import runpy

_set_start_method = multiprocessing.set_start_method

if __name__ == "__main__":
    multiprocessing.set_start_method = lambda *_, **__: _set_start_method("fork", force=True)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)

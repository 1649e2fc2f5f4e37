import os
import subprocess
import sys

# The script measures a token's time beside two spinning processes.
# It prints the ratio to a token's time without these processes.
SCRIPT = """
import subprocess, sys, time
from negamax import LLM, SamplingParams

llm = LLM("nano", num_threads=2, show_progress=False)
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

def measure():
    started = time.perf_counter()
    llm.generate("Count to a hundred.", params)
    return time.perf_counter() - started

measure()
ratios = []
for _ in range(2):
    alone = measure()
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        ratios.append(measure() / alone)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
print(min(ratios))
"""


def test_openmp_threads_do_not_spin_at_barriers() -> None:
    own = ("OMP_", "GOMP_", "KMP_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, stdout=subprocess.PIPE, text=True,
        check=True, timeout=240,
    )  # fmt: skip
    assert float(result.stdout.split()[-1]) <= 4

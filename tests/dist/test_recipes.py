import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from negamax.options.nodes import KEY_VARIABLE
from tests.dist.machines import Agent, NoMachinesError, machines
from tests.dist.nodes import FLOAT32, PROMPTS
from tools.load.server import Server, serving

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
ROWS = {
    label: (line, said)
    for label, line, said in re.findall(
        r"^\| ([^|]+) \| `(M[23]\S* --.+?)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M
    )
}
MODELS = {"M2.5": "nano", "M3": "nano-m3"}
ADDRESS = "10.0.0.1"  # address of node 0 on the page
# options of each machine, by the page's name of the deployment
TP2 = "M2.5 --tensor-parallel-size 2"
EXPERTS = "--enable-expert-parallel"
TWO_PROMPTS = "--prefill-context-parallel-size 2"
DP2 = f"{TP2} --data-parallel-size 2 --data-parallel-size-local 1"
MEETING = f"--data-parallel-address {ADDRESS} --data-parallel-rpc-port 13389"
TWO_STAGES = f"{TP2} --pipeline-parallel-size 2"
NODE_1 = f"--nnodes 2 --node-rank 1 --dist-init-addr {ADDRESS}:29501"
SMALL: tuple[dict[str, str], ...] = (
    {"TP4 x DP4, experts split over 16 GPUs": f"{TP2} --data-parallel-size 2 {EXPERTS}"},
    {"TP16 on one machine (with copies of KV heads)": "M2.5 --tensor-parallel-size 4"},
    {
        "TP8 with each prompt split over two groups": f"{TP2} {TWO_PROMPTS} "
        "--cp-kv-cache-interleave-size 128"
    },
    {
        "DP2 with each prompt split over two groups": "M2.5 --tensor-parallel-size 1 "
        f"--data-parallel-size 2 {TWO_PROMPTS} {EXPERTS}"
    },
    {
        "DP2 x TP8, first machine": f"{DP2} {MEETING}",
        "DP2 x TP8, second machine": f"{DP2} --headless --data-parallel-start-rank 1 {MEETING}",
    },
    {
        "PP2 x TP8, first machine": f"{TWO_STAGES} --nnodes 2 --node-rank 0 "
        f"--master-addr {ADDRESS}",
        "PP2 x TP8, second machine, SGLang's options": f"M2.5 --tp 2 --pp-size 2 {NODE_1}",
    },
    {"PP2 x TP8 on one machine": TWO_STAGES},
    {"DP8 EP8 with vLLM's options": "M2.5 --data-parallel-size 4 --enable-expert-parallel"},
    {"DP8 EP8 with SGLang's options": "M2.5 --tp 4 --attn-dp-size 4 --ep 4"},
    {"two replicas of TP4, SGLang's options": "M2.5 --tp 2 --dp-size 2"},
    {"DP4 TP2 EP8 with SGLang's options": "M3 --tp 4 --attn-dp-size 2 --ep 4"},
    {
        "disaggregated prefilling server": "M3 --tensor-parallel-size 2 --kv-transfer-config "
        '{"kv_connector":"TcpConnector","kv_role":"kv_producer","kv_port":5731}'
    },
)


def test_each_deployment_of_the_page_has_a_small_one_with_its_options() -> None:
    small = {label: line for deployment in SMALL for label, line in deployment.items()}
    served = {label: line for label, (line, said) in ROWS.items() if "refused" not in said}
    assert {label: names(line) for label, line in small.items()} == {
        label: names(line) for label, line in served.items()
    }
    fixed = re.compile(r"--(?:\S+-(?:address|addr|port|rank|local)|nnodes) \S+")
    assert {label: fixed.findall(line) for label, line in small.items()} == {
        label: fixed.findall(line) for label, line in served.items()
    }


def names(line: str) -> list[str]:
    return [word for word in line.split() if word.startswith(("M", "--"))]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    found = {}
    for model in MODELS.values():
        with serving(*FLOAT32, model=model) as server:
            found[model] = answers(server)
    return found


@pytest.mark.full
@pytest.mark.parametrize("deployment", SMALL, ids=lambda deployment: next(iter(deployment)))
def test_small_deployments_answer_as_one_rank_does(
    deployment: dict[str, str], expected: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    (model, *first), *others = (line.split() for line in deployment.values())
    with contextlib.ExitStack() as stack:
        if others:
            try:
                network = stack.enter_context(machines(2))
            except NoMachinesError as error:
                pytest.skip(str(error))
            here = network.address(0)
            first = [word.replace(ADDRESS, here) for word in first]
            (_, *second) = (word.replace(ADDRESS, here) for word in others[0])
            stack.callback(Agent(network, 1, *FLOAT32, *second).kill)
        server = stack.enter_context(serving(*FLOAT32, *first, model=MODELS[model]))
        assert answers(server) == expected[MODELS[model]]


def answers(server: Server) -> list[str]:
    async def answer(prompt: str) -> str:
        connection = server.connection()
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "temperature": 0.0}
        try:
            reply = await connection.post("/v1/completions", body)
        finally:
            connection.hang_up()
        assert reply.status == 200, reply.body
        text: str = json.loads(reply.body)["choices"][0]["text"]
        return text

    async def all_answers() -> list[str]:
        return list(await asyncio.gather(*map(answer, PROMPTS)))

    return asyncio.run(all_answers())

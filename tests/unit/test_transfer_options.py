from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.options.engine import EngineOptions
from negamax.options.transfer import FAIL, NIXL, RECOMPUTE, TCP, KvTransferConfig
from tests.tables import read_table

OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def test_keys_of_vllm_and_nested_connectors() -> None:
    assert KvTransferConfig.read({}) == KvTransferConfig()
    given = {
        "kv_connector": "TcpConnector",
        "kv_role": "kv_producer",
        "kv_ip": "::1",
        "kv_port": 7,
        "kv_load_failure_policy": "recompute",
        "kv_buffer_size": 1e9,
        "engine_id": None,
        "kv_connector_extra_config": {"lease_seconds": 3, "timeout_seconds": 4.5, "backends": []},
    }
    expected = KvTransferConfig("kv_producer", TCP, "::1", 7, RECOMPUTE, 3.0, 4.5)
    rdma = {"kv_connector_extra_config": {"transport": "rdma"}}
    assert KvTransferConfig.read(rdma) == KvTransferConfig(transport="rdma")
    assert KvTransferConfig.read(given) == expected and expected.is_loopback
    nested = [OFFLOADING, {"kv_connector": "NixlConnector", "kv_port": 9}, {"kv_connector": "x"}]
    extra = {"connectors": nested}
    given = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
    found = KvTransferConfig.read({**given, "kv_connector_extra_config": extra})
    assert found == KvTransferConfig("kv_consumer", NIXL, port=9, failure_policy=FAIL)
    for others in ([], [OFFLOADING], "x"):
        given = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": others},
        }
        assert KvTransferConfig.read(given) is None
    assert KvTransferConfig.read(OFFLOADING) is None


@pytest.mark.parametrize("given", read_table("transfer_options.other_values_are_refused"))
def test_other_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        EngineOptions(model="nano", kv_transfer_config=given)


def test_host_memory_is_there_without_another_option() -> None:
    both = EngineOptions(model="nano", kv_transfer_config={})
    assert both.host_gib == 4.0 and both.has_host_blocks
    assert EngineOptions(model="nano").host_gib is None
    given = EngineOptions(model="nano", kv_transfer_config={}, kv_offloading_size=7.0)
    assert given.host_gib == 7.0
    ratio = EngineOptions(model="nano", kv_transfer_config={}, kv_offloading_ratio=2.0)
    assert ratio.host_gib is None and ratio.has_host_blocks
    with pytest.raises(ConfigError, match="whole KV blocks"):
        EngineOptions(model="nano", kv_transfer_config={}, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--kv-offloading-path is empty"):
        EngineOptions(model="nano", kv_offloading_size=1.0, kv_offloading_path="")

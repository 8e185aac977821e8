"""A vLLM engine in a process of its own, for the tests: commands and answers are lines of JSON.

Run with the Python that vLLM is installed for: ``python tests/vllm/engine.py OPTIONS``, OPTIONS being a
JSON object with the arguments of ``vllm.LLM``. The first line tells that it is ready, or why it is not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first question waits for a C++ compiler
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    options = json.loads(sys.argv[1])

    def answer(**members: Any) -> None:
        print(json.dumps(members), file=answers)

    import vllm

    try:
        llm = vllm.LLM(
            **({"enforce_eager": True, "block_size": 32, "seed": 0, "disable_log_stats": False} | options)
        )
    except Exception as error:
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)  # type: ignore[arg-type]
        answer(error=str(causes[-1]), said=[str(each) for each in causes])
        return
    answer(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer(**HANDLERS[command.pop("do")](llm, **command))


def generate(
    llm: Any, prompts: list[dict[str, Any]], tokens: int, lora: str | None = None, logprobs: int | None = 1
) -> dict[str, Any]:
    """Generate greedily for prompts together; the seconds are those of the whole."""
    import vllm
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, lora) if lora is not None else None
    params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    taken = time.perf_counter() - started
    results = []
    for output in outputs:
        (only,) = output.outputs
        steps = only.logprobs or []
        results.append(
            {
                "tokens": list(only.token_ids),
                "logprobs": [step[token].logprob for step, token in zip(steps, only.token_ids, strict=False)],
                "cached": output.num_cached_tokens,
                "finish": only.finish_reason,
                "top": {token: each.logprob for token, each in steps[-1].items()}
                if (logprobs or 0) > 1
                else {},
            }
        )
    return {"results": results, "seconds": taken}


def forget(llm: Any) -> dict[str, Any]:
    """Forget what the engine has cached itself."""
    return {"done": llm.reset_prefix_cache()}


def counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's own counters of caches, and those of the connector's two sides."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    found = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in llm.get_metrics()
        if "prefix_cache" in metric.name and hasattr(metric, "value")
    }
    own: dict[str, int] = {}
    if has_kv_transfer_group():
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for side in (scheduler.connector, get_kv_transfer_group()):
            own |= dict(side.counted)
    return {"vllm": found, "own": own}


def settle(llm: Any) -> dict[str, Any]:
    """Wait until all that was computed is stored."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    connector._transfers.flush(60.0)
    return {"stored_blocks": connector.counted["stored_blocks"]}


def stop(llm: Any) -> dict[str, Any]:
    """Stop as vLLM does at the end of a process."""
    llm.llm_engine.engine_core.shutdown()
    return {"stopped": True}


HANDLERS = {
    "generate": generate,
    "forget": forget,
    "counters": counters,
    "settle": settle,
    "stop": stop,
}

if __name__ == "__main__":
    main()

"""What `import oasis_hf` does not do: import triton, touch a GPU, patch Transformers, take long."""

import json
import os
import subprocess
import sys

MOST_SECONDS = 0.3


def in_a_fresh_process(script: str) -> dict[str, object]:
    """Runs `script`, whose last act is to print one line of JSON."""
    # What is imported is compiled once and kept, as it is by default.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=kept
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_importing_imports_no_triton_and_initialises_no_gpu() -> None:
    report = in_a_fresh_process(
        "import json, sys\n"
        "from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache\n"
        "before = 'triton' in sys.modules\n"
        "import torch, oasis_hf\n"
        "print(json.dumps({\n"
        "    'triton': 'triton' in sys.modules and not before,\n"
        "    'cuda': torch.cuda.is_initialized(),\n"
        "    'cli': 'typer' in sys.modules and 'oasis_hf.cli' in sys.modules,\n"
        "    'generation': 'oasis_hf.generation' in sys.modules,\n"
        "    'conversation': 'oasis_hf.conversation' in sys.modules,\n"
        "}))\n"
    )
    assert not any(report.values()), report
    assert len(report) == 5


def test_importing_registers_the_attention_and_patches_nothing() -> None:
    report = in_a_fresh_process(
        "import json\n"
        "import transformers\n"
        "from transformers import AttentionInterface, cache_utils, masking_utils, modeling_utils\n"
        "from transformers.generation import GenerationMixin\n"
        "from transformers.generation import candidate_generator, utils\n"
        "from transformers.models.llama import modeling_llama\n"
        "from transformers.integrations import sdpa_attention\n"
        "holders = [cache_utils, masking_utils, modeling_utils, GenerationMixin, utils,\n"
        "           candidate_generator, modeling_llama, modeling_llama.LlamaAttention,\n"
        "           modeling_llama.LlamaForCausalLM, modeling_utils.PreTrainedModel,\n"
        "           cache_utils.Cache, cache_utils.DynamicCache, cache_utils.DynamicLayer,\n"
        "           sdpa_attention]\n"
        "known = set(AttentionInterface().keys())\n"
        "masks = set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.keys())\n"
        "before = [dict(vars(holder)) for holder in holders]\n"
        "attentions = dict(AttentionInterface().items())\n"
        "import oasis_hf\n"
        "patched = [name for holder, old in zip(holders, before)\n"
        "           for name, value in old.items() if vars(holder).get(name) is not value]\n"
        "changed = [k for k, v in attentions.items() if AttentionInterface()[k] is not v]\n"
        "print(json.dumps({\n"
        "    'patched': patched, 'changed': changed,\n"
        "    'attentions': sorted(set(AttentionInterface().keys()) - known),\n"
        "    'masks': sorted(set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.keys()) - masks),\n"
        "}))\n"
    )
    assert report == {
        "patched": [],
        "changed": [],
        "attentions": ["oasis"],
        "masks": ["oasis"],
    }


def test_importing_adds_little_to_what_loading_a_model_imports() -> None:
    # Processor time, so that other processes on the machine do not count; the best of three, as
    # the first may have to compile. Whoever loads a model imports `modeling_utils`.
    script = (
        "import json, time\n"
        "from transformers import AutoModelForCausalLM, modeling_utils\n"
        "start = time.process_time()\n"
        "import oasis_hf\n"
        "print(json.dumps({'seconds': time.process_time() - start}))\n"
    )
    seconds = min(float(str(in_a_fresh_process(script)["seconds"])) for _ in range(3))
    assert seconds <= MOST_SECONDS

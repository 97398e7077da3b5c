"""Makes the small models of this folder and what transformers computes with them: logits, loss and gradients of one
batch, and ten steps of AdamW. Usage: make.py, here, with torch, transformers and safetensors (5.23.0 and 0.8.0 made them)."""

import json
import math
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "transformers"))
from reference import results

SHAPE = dict(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e6)
# As their publishers write config.json: transformers 4's fields, no attention_bias.
MODELS = {
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, use_sliding_window=False, sliding_window=4, max_window_layers=2)),
    "mistral": ("Mistral", dict(num_hidden_layers=1, head_dim=16, tie_word_embeddings=False, sliding_window=24)),
}
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def steps(model, batches):
    """Losses and norms: matrices decay, so much that a bias that did too would show; gradients clipped to a norm of 1."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=10.0), dict(params=others, weight_decay=0.0)], **ADAMW)
    losses, norms = [], []
    for batch in batches:
        computed = results(model, batch)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(computed["loss"].item())
        optimizer.step()
    return dict(losses=losses, grad_norms=norms)


for name, (family, own) in MODELS.items():
    folder = Path(__file__).parent / name
    folder.mkdir(exist_ok=True)
    fields = dict(architectures=[f"{family}ForCausalLM"], model_type=name, torch_dtype="float32", **SHAPE | own)
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    torch.manual_seed(1234)
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in model.parameters():
            # Biases are made as zeros and norms as ones, which would hide what is wrong with them.
            tensor.add_(torch.randn_like(tensor) * 0.1) if tensor.dim() == 1 else tensor.mul_(3)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    batches = []
    for index in range(10):
        ids = torch.randint(0, config.vocab_size, (2, 24))
        labels = ids.clone()
        labels[index % 2, -5:] = -100
        batches.append(dict(input_ids=ids, labels=labels))
    save_file({f"{key}.{i}": t for i, batch in enumerate(batches) for key, t in batch.items()}, folder / "batch.safetensors")
    computed = results(model, batches[0])
    expected = dict(
        tokens=int((batches[0]["labels"][:, 1:] != -100).sum()),
        loss=computed.pop("loss").item(),
        grad_norm=computed.pop("grad_norm").item(),
        adamw=steps(model, batches),
    )
    save_file(computed, folder / "expect.safetensors")
    (folder / "expect.json").write_text(json.dumps(expected, indent=1) + "\n")

"""Settings of earlier versions whose place has changed, with the line to write."""

from __future__ import annotations

from collections.abc import Mapping

OR = ", or "
"""Between two ways to write a setting now. Each is for the kinds of run that have its section."""


def _below(section: str, ways: Mapping[str, str | tuple[str, ...]]) -> dict[str, str]:
    return {
        f"{section}.{name}": OR.join(
            f"{section}: {{{line}}}" for line in ((lines,) if isinstance(lines, str) else lines)
        )
        for name, lines in ways.items()
    }


def _of_reference(name: str) -> tuple[str, str]:
    """Of a KL term, and of online DPO."""
    return (
        f"reference: {{kl_loss_coef: …, {name}: …}}",
        f"preference: {{…}}, reference: {{{name}: …}}",
    )


PPO = "loss: {name: ppo, %s: …}"
PREFERENCE = "preference: {%s}"
TRUNCATION = "correction: {truncation: {level: token, %s: …}}"
REJECTION = "correction: {rejection: {above: …, %s: …}}"

MOVED: Mapping[str, str] = {
    **_below(
        "algorithm",
        {
            **{name: PPO % name for name in ("eps_clip", "eps_clip_high", "dual_clip")},
            "old_policy": PPO % "old_policy",
            "tau_positive": "loss: {name: sapo, tau_positive: …}",
            "tau_negative": "loss: {name: sapo, tau_negative: …}",
            "dppo_threshold": "loss: {name: dppo, threshold: …}",
            **{
                f"vespo_{name}": f"loss: {{name: vespo, {name}: …}}"
                for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
            },
            "cov_share": "loss: {name: clip_cov, cov_share: …}",
            "clip_cov_low": "loss: {name: clip_cov, clip_cov_low: …}",
            "clip_cov_high": "loss: {name: clip_cov, clip_cov_high: …}",
            "kl_cov_coef": "loss: {name: kl_cov, kl_cov_coef: …}",
            "pass_k": "advantage: {name: pass_at_k, pass_k: …}",
            "pass_threshold": "advantage: {name: pass_at_k, pass_threshold: …}",
            "gamma": "advantage: {name: gae, gamma: …}",
            "gae_lambda": "advantage: {name: gae, gae_lambda: …}",
            "value_coef": "advantage: {name: gae, value_coef: …}",
            "bootstrap_truncated": "advantage: {name: gae, bootstrap_truncated: …}",
            "turn_coef": "advantage: {name: grpo, turns: {coef: …}}",
            "turn_gamma": "advantage: {name: grpo, turns: {coef: …, gamma: …}}",
            "ce_coef": "ce: {coef: …}",
            "ce_min_reward": "ce: {coef: …, min_reward: …}",
            "kl_coef": "reference: {kl_coef: …}",
            "kl_loss_coef": "reference: {kl_loss_coef: …}",
            "kl_estimator": (
                "reference: {kl_loss_coef: …, estimator: …}",
                "reference: {kl_coef: …}",
            ),
            "ref_load": _of_reference("ref_load"),
            "ref_update_interval": _of_reference("update_interval"),
            "ref_num_cpus": _of_reference("num_cpus"),
            "ref_gpu_memory_utilization": _of_reference("gpu_memory_utilization"),
            **{f"correction.{name}": TRUNCATION % name for name in ("floor", "normalize")},
            "correction.cap": (TRUNCATION % "cap", "reference: {kl_loss_coef: …, cap: …}"),
            "correction.mask_below": "correction: {band: {below: …}}",
            "correction.mask_above": "correction: {band: {above: …}}",
            "correction.reject_above": "correction: {rejection: {above: …}}",
            "correction.reject_estimator": REJECTION % "estimator",
            "correction.reject_level": REJECTION % "level",
            "correction.sequence_mask_above": "correction: {sequence_mask: {above: …}}",
            "preference.beta": PREFERENCE % "loss: {name: sigmoid, beta: …}",
            "preference.min_margin": PREFERENCE % "pairs: {name: best_worst, min_margin: …}",
            "preference.max_pairs": PREFERENCE % "pairs: {name: margin, max_pairs: …}",
            "preference.missing_eos_penalty": (
                PREFERENCE % "pairs: {name: best_worst, missing_eos_penalty: …}"
            ),
            "distillation.top_k": "distillation: {use: {name: top_k, top_k: …}}",
            "distillation.coef": "distillation: {use: {name: advantage, coef: …}}",
            **{
                f"distillation.{name}": f"distillation: {{teacher: {{url: …, {name}: …}}}}"
                for name in ("model", "key_env", "timeout_s", "retries", "at_once")
            },
        },
    ),
    **_below(
        "dpo",
        {
            "beta": "loss: {name: sigmoid, beta: …}",
            "label_smoothing": "loss: {name: sigmoid, label_smoothing: …}",
            "length_normalized": "loss: {name: sigmoid, length_normalized: …}",
            "simpo_margin": "loss: {name: simpo, simpo_margin: …}",
            "desirable_weight": "loss: {name: kto, desirable_weight: …}",
            "undesirable_weight": "loss: {name: kto, undesirable_weight: …}",
        },
    ),
    **_below(
        "learner",
        {
            "lr_scheduler_type": "schedule: {name: …}",
            "warmup_steps": "schedule: {name: constant, warmup_steps: …}",
            "adam_betas": "optimizer: {name: adamw, betas: …}",
            "adam_eps": "optimizer: {name: adamw, eps: …}",
        },
    ),
    "learner.value_learning_rate": OR.join(
        (
            "algorithm: {advantage: {name: gae, value_learning_rate: …}}",
            "reward_model: {value_learning_rate: …}",
        )
    ),
    **_below("staleness", {"over_sampling": "on_stale: {name: drop, over_sampling: …}"}),
    **_below(
        "reward",
        {
            "retries": "policy: {name: retry, retries: …}",
            "overlong_buffer": "overlong: {buffer: …}",
            "overlong_penalty": "overlong: {buffer: …, penalty: …}",
        },
    ),
    **_below("rollout", {"repetition_ngram": "repetition_stop: {times: …, ngram: …}"}),
    **_below("data", {"length_side": "length_policy: {name: truncate, side: …}"}),
    **_below(
        "warm_start",
        {"completion_policy": "packing_strategy: {name: bfd, completion_policy: …}"},
    ),
    "agent": f"environment: {{agent: …}}{OR}environment: {{command: […]}}",
    "agent.command": "environment: {command: […]}",
    "agent.function": "environment: {agent: …}",
    "agent.arguments": "environment: {agent: …, arguments: {…}}",
    "agent.variables": "environment: {command: […], variables: {…}}",
    "agent.stdin": "environment: {command: […], stdin: …}",
}
"""Earlier dotted name → the YAML to write now; several ways with `OR` between them."""

"""What each metric means. The docs' metrics reference is generated from this table.

A metric with an alarm takes its healthy range and its advice from `asyncrl.observe.alarms`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from asyncrl.observe.alarms import RANGES, Range


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the reference."""

    names: str
    """One name, or several that belong together, separated by ", ". `<…>` varies."""
    meaning: str
    healthy: str = ""
    advice: str = ""
    """What to do outside the healthy values."""

    def alarm(self) -> Range | None:
        """The range whose violation is an alarm, or None."""
        return next((RANGES[name] for name in self.names.split(", ") if name in RANGES), None)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """Metrics that one kind of event carries."""

    title: str
    event: str
    metrics: tuple[Metric, ...]


STEP = (
    Metric("applied", "1 if the step was applied, 0 if all ranks skipped it", "1"),
    Metric(
        "loss",
        "loss of the step, with entropy bonus, KL and value terms, aggregated as"
        " `algorithm.loss_aggregation` says",
        "any value: the loss does not measure progress",
    ),
    Metric("loss/<name>", "mean over the step's tokens of a metric that your loss returns"),
    Metric(
        "grad_norm, grad_norm_ratio",
        "L2 norm of the gradient before clipping to `learner.max_grad_norm`; its ratio to the"
        " median of the last 32 steps (1 in the first eight)",
    ),
    Metric("learning_rate", "learning rate of this step"),
    Metric(
        "tokens, input_tokens, trajectories",
        "loss tokens; all tokens, prompts included; trajectories in the step",
    ),
    Metric(
        "micro_batches, fill",
        "packed rows over all ranks; share of their capacity in use",
        "`fill` near 1 with long rows",
        "a batch far below the capacity is not a fault; `learner.packing: none` puts one"
        " trajectory in each forward",
    ),
    Metric(
        "imbalance",
        "extra time of the step because ranks have unequal work, Σ largest / Σ mean - 1 over"
        " rounds of one micro-batch per rank; l tokens cost l + c·l², with c from the attention's"
        " FLOPs",
        "0 to 0.05",
        "larger batches, or a larger `learner.max_tokens_per_gpu`",
    ),
    Metric("ratio_mean, ratio_max", "mean and largest r"),
    Metric("ess", "effective sample size as a share of the tokens: (Σr)² / (N·Σr²)"),
    Metric("chi2", "mean of (r - 1)²: the variance of the importance weights"),
    Metric(
        "kl_k1, kl_k3",
        "two estimates of KL(behavior ‖ learner) per token, in nats: mean of -log r; mean of"
        " r - 1 - log r",
    ),
    Metric(
        "clip_fraction",
        "share of tokens whose gradient (CISPO: weight) the loss's own clip stops",
    ),
    Metric(
        "mask_fraction, mask_fraction/band, mask_fraction/rejected, mask_fraction/sequence",
        "share of tokens that `algorithm.correction` masks; by `band`; by `rejection`; by"
        " `sequence_mask`. One token may have several reasons",
    ),
    Metric(
        "weight_mean, capped_fraction",
        "mean truncated importance weight (1 without truncation and with"
        " `correction.truncation.normalize`); share of tokens whose weight"
        " `correction.truncation.cap` or `floor` changes",
        "near 1; below 0.1",
        "as for `ess`, or raise `correction.truncation.cap`",
    ),
    Metric(
        "in_flight_drift, in_flight_drift_tokens",
        "mean of abs(log r) over tokens that the learner's own version sampled in trajectories"
        " of an older version, and the number of those tokens. It isolates the effect of the old"
        " KV cache from staleness",
        "1e-5 in float32 under `recompute` and `drain`",
        "under `in_flight: keep`: use `recompute`, or smaller steps",
    ),
    Metric(
        "kl_reference",
        "estimate (`algorithm.reference.estimator`) of KL(learner ‖ reference) per token, in"
        " nats; 0 without a KL term",
        "grows slowly",
        "raise `algorithm.reference.kl_coef` or `kl_loss_coef`",
    ),
    Metric(
        "distill/reverse_kl",
        "under `algorithm.distillation`: mean of log π_behavior - log π_teacher over the step's"
        " loss tokens, in nats",
        "falls towards 0",
        "if it rises: a lower `learner.learning_rate` or `staleness.max_staleness`",
    ),
    Metric(
        "distill/top_k_kl, distill/tail",
        "under `algorithm.distillation.use: top_k`: mean KL(learner ‖ teacher) over the step's loss"
        " tokens, in nats, before the step; the learner's mean probability of the tokens that only"
        " count together",
        "both fall towards 0",
        "a `tail` that stays high: a higher `algorithm.distillation.use.top_k`",
    ),
    Metric(
        "distill/teacher_s",
        "under `algorithm.distillation`: mean seconds of the teacher's answer for a group, waiting"
        " included",
        "below `time/step_s`",
        "a higher `distillation.teacher.at_once`, or a server with more replicas",
    ),
    Metric("value_loss", "loss of the value head under `advantage: gae`, otherwise 0", "falls"),
    Metric(
        "entropy, entropy_ratio",
        "mean entropy of the learner's distribution, in nats; its ratio to the highest entropy of"
        " the run's first eight steps",
    ),
    Metric(
        "nonfinite_loss, nonfinite_gradient",
        "tokens and micro-batches with NaN or Inf; ranks with NaN or Inf in their gradient",
    ),
    Metric("step_s, tokens_per_s", "seconds inside the learner; its input tokens per second"),
)

FIXED_ROWS = (
    Metric(
        "ce/loss",
        "mean negative log-likelihood of the targets, in nats per token; under `dpo.ce_coef`, of"
        " the chosen sides' tokens; under `algorithm.ce.coef`, of completions with enough reward",
        "falls; compare it with the held-out loss",
    ),
    Metric(
        "pieces_left_out, tokens_left_out",
        "pieces of cut rows without a token to predict; targets that no piece predicts, since a"
        " piece's first token is only context",
        "0 under `packing_strategy: bfd`",
    ),
    Metric(
        "pairs, long_pairs, completions",
        "pairs of the step; those whose sides do not fit into one micro-batch, which need another"
        " forward pass; single completions of a step of KTO",
        "few long pairs",
        "raise `learner.max_tokens_per_gpu`",
    ),
    Metric(
        "pref/loss",
        "mean loss of a pair or a single completion, off-policy weight included",
        "falls: from log 2 = 0.693 for the sigmoid, 1 for the hinge, 0.5 for KTO",
    ),
    Metric(
        "pref/accuracy",
        "share of pairs whose chosen side has the higher reward; for KTO, share of completions on"
        " the right side of the baseline",
        "rises above 0.5, and more slowly on held-out pairs",
        "near 1 on training pairs alone: fewer epochs, or a larger `dpo.loss.beta`",
    ),
    Metric(
        "pref/margin, pref/chosen_reward, pref/rejected_reward",
        "mean reward of the chosen side minus that of the rejected side; mean reward of each side:"
        " beta times the log-ratio of learner to reference, in nats, summed over the side's tokens"
        " (a mean for ipo, simpo and length_normalized)",
        "the margin rises",
    ),
    Metric(
        "pref/margin_at_staleness_<k>",
        "under `algorithm.preference`: mean margin of the pairs whose older side has staleness k;"
        " absent without such a pair",
        "similar for every k",
        "smaller staleness, or a smaller `algorithm.preference.weight_cap`",
    ),
    Metric(
        "pref/groups_without_pair",
        "under `algorithm.preference`: groups of the step whose rewards do not differ by"
        " `min_margin`, or with fewer than two usable trajectories",
        "few",
        "harder or easier prompts, or `algorithm.filter_zero_variance`",
    ),
    Metric(
        "pref/chosen_logprob, pref/rejected_logprob",
        "mean log-prob of each side, in nats, summed over its tokens",
        "the rejected side falls faster than the chosen one",
        "if the chosen side falls as fast: set `dpo.ce_coef`",
    ),
    Metric(
        "pref/weight_mean, pref/capped_fraction",
        "mean off-policy weight of a pair; share of pairs whose weight the cap reduces",
        "near 1; below 0.1",
        "smaller staleness, or a larger cap",
    ),
    Metric(
        "pref/kl",
        "KTO's baseline: estimate of KL(learner ‖ reference) per completion, in nats, from"
        " mismatched prompts and completions, at least 0",
        "grows slowly",
    ),
)

BATCH = (
    Metric(
        "staleness/mean, staleness/max",
        "the learner's version minus the oldest version of a token of the group that is trained",
        "max at most `staleness.max_staleness`, always",
    ),
    Metric(
        "stale/masked_ratio, stale/empty_ratio",
        "with `staleness.on_stale: mask`: share of the step's loss tokens that are older than the"
        " bound, and so are masked; share of its trajectories that keep no token",
    ),
    Metric(
        "stale/kept_by_length_1, stale/kept_by_length_2, stale/kept_by_length_3,"
        " stale/kept_by_length_4",
        "with `mask`: share of the tokens that are kept, by quarter of the step's trajectories from"
        " the shortest to the longest",
        "near 1",
    ),
    Metric(
        "stale/kept_by_position_1, stale/kept_by_position_2, stale/kept_by_position_3,"
        " stale/kept_by_position_4",
        "the same by quarter of each trajectory, from its first to its last token",
        "near 1; the first is the lowest",
    ),
    Metric("staleness/histogram", "number of groups of staleness 0, 1, 2, …"),
    Metric(
        "reference/age_mean",
        "the learner's version minus that of the reference policy that scored the group, mean over"
        " groups. 0 is the version of `algorithm.reference.ref_load`",
        "with `algorithm.reference.update_interval`, below it plus `staleness.max_staleness`",
    ),
    Metric(
        "staleness/in_flight_mean, staleness/in_buffer_mean",
        "staleness gained during generation (newest minus oldest version); staleness gained"
        " afterwards",
        "",
        "in flight: answers are long; in buffer: the learner is the slower side",
    ),
    Metric(
        "reward/mean, reward/<name>, reward/<name>/<part>",
        "mean reward; mean of each reward function; mean of each part that a function returns",
        "rises",
    ),
    Metric(
        "reward/std, reward/min, reward/p10, reward/median, reward/p90, reward/max",
        "population standard deviation and quantiles of the rewards of the step's trajectories,"
        " over all groups",
        "a `std` of 0 teaches nothing",
    ),
    Metric(
        "data/prompts_seen, data/epoch",
        "prompts of the run that have an outcome, in all its attempts; the same in epochs of"
        " `data.train`",
    ),
    Metric(
        "reward/<name>/unscored_ratio, reward/unscored_ratio",
        "share of the trajectories scored since the previous step that this function did not"
        " score, because it returned None or failed; the largest of these shares",
    ),
    Metric(
        "reward/<name>/unscored_refused_ratio, reward/unscored_refused_ratio",
        "the same, for requests that the server of a judge or a reward model refuses; with"
        " `pairwise_judge`, shares of comparisons",
    ),
    Metric(
        "reward/<name>/unscored_cut_ratio, reward/unscored_cut_ratio",
        "the same, for judgments that reached `judge.max_tokens`",
    ),
    Metric(
        "reward/<name>/unscored_unread_ratio, reward/unscored_unread_ratio",
        "the same, for replies of a judge without a score that can be read",
    ),
    Metric(
        "reward/<name>/unscored_<reason>_ratio, reward/unscored_<reason>_ratio",
        "the same, for a part `unscored_REASON` that your own reward returns",
        "0",
    ),
    Metric(
        "baseline/reward, baseline/tokens, baseline/truncated_ratio",
        "with `algorithm.advantage: remax`: mean reward and mean number of tokens of the greedy"
        " completions of the step's groups; share of them that were cut off",
        "`reward` near `reward/mean`, often above it",
    ),
    Metric(
        "baseline/missing_ratio",
        "share of the groups scored since the previous step that were dropped because their greedy"
        " completion has no reward",
        "0",
        "a reward function that returns None for it",
    ),
    Metric(
        "source/<name>_share, source/<name>_reward",
        "with several sources in `data.train`: each source's share of the step's groups, and its"
        " mean reward",
        "near the share in the plan; rises",
    ),
    Metric(
        "reward/zero_variance_ratio",
        "share of the groups scored since the previous step, filtered ones included, whose rewards"
        " are all equal, those of greedy completions included: they carry no gradient",
    ),
    Metric(
        "rollout/completion_tokens, rollout/completion_tokens_min, rollout/completion_tokens_p10,"
        " rollout/completion_tokens_median, rollout/completion_tokens_p90,"
        " rollout/completion_tokens_max",
        "mean and quantiles of the number of tokens in a completion, or in a session's turns",
    ),
    Metric(
        "rollout/truncated_ratio",
        "share of completions that reached `max_completion_length` or `max_length`, or that"
        " `rollout.repetition_stop` ended",
    ),
    Metric(
        "rollout/unscored_ratio, rollout/bad_logprob_ratio, rollout/over_long_ratio,"
        " rollout/no_token_ratio, rollout/no_teacher_ratio",
        "share of the trajectories scored since the previous step that are masked: without a"
        " reward; with NaN or Inf from the generator or the reference; too long; without a token"
        " to learn from; not scored by the teacher",
    ),
    Metric(
        "session/done_ratio, session/length_ratio, session/turns_ratio, session/closed_ratio",
        "with an environment: share of the sessions scored since the previous step that ended in"
        " this way (docs/how_to/environments.md)",
    ),
    Metric(
        "session/env_error_ratio, session/agent_error_ratio, session/reward_error_ratio,"
        " session/deadline_ratio",
        "share of them whose environment failed; whose agent program failed; that got no valid"
        " reward; that reached `environment.deadline_s`, turn_s or tool_s. They are not trained",
    ),
    Metric("session/turns", "mean number of turns of a session"),
    Metric(
        "session/unasked_ratio",
        "share of the sessions in which the model took no turn, although nothing failed. They are"
        " not trained (`no_token`)",
    ),
    Metric(
        "session/branch_ratio",
        "share of the turns whose rows repeat tokens of turns before them: all branches except"
        " forked and repeated ones, and separate ones, such as those of another agent",
    ),
    Metric(
        "session/branches_rewritten, session/branches_separate, session/branches_forked,"
        " session/branches_repeated, session/branches_drift, session/branches_cut,"
        " session/branches_history",
        "number of these branches, by class; absent without one (docs/how_to/environments.md)",
    ),
    Metric(
        "session/unparsed_ratio",
        "share of the turns whose tool calls or reasoning could not be parsed. Their text is kept",
    ),
    Metric(
        "session/overridden",
        "mean number of arguments of a session's requests that had no effect, such as a"
        " temperature: the run decides about sampling. Requests count too if the chat template does"
        " not write their tools",
    ),
    Metric(
        "session/turn_reward",
        "mean reward of the turns to which the environment gave one of their own",
        "rises",
    ),
    Metric(
        "session/prefix_hit_ratio",
        "share of a session's reusable prompt tokens that its replica had in the prefix cache."
        " Reusable: whole cache blocks that earlier turns read or sampled with the same weights."
        " NaN without any",
    ),
    Metric(
        "session/model_s, session/other_s",
        "mean seconds of a session in which it waited for the model; all its other seconds",
    ),
    Metric(
        "session/tokens_sampled, session/tokens_trained, session/tokens_<reason>",
        "sampled tokens of the step's groups; those that are trained; those that are masked, by"
        " the status of their turn or session, or as `stale` (`on_stale: mask`). The first is the"
        " sum of the others",
    ),
    Metric(
        "session/repeated_tokens",
        "sampled tokens that rows of the step's sessions read again as context, after the row that"
        " counts them. They are no part of that sum",
    ),
    Metric(
        "rollout/logprob_mean",
        "mean behavior log-prob of the sampled tokens, in nats, over the groups scored since the"
        " previous step. Text is at -0.1 to -2; uniform sampling from 150,000 tokens is at -12",
    ),
    Metric(
        "rollout/loop_ratio",
        "share of completions that contain a loop: one n-gram of at most 32 tokens, at least four"
        " times in a row and over at least 32 tokens",
    ),
    Metric(
        "rollout/unprintable_ratio",
        "share of the completions' characters that are not text: control characters, private and"
        " unassigned code points, and U+FFFD",
    ),
)

WAITING = (
    Metric(
        "time/learner_waited_s",
        "seconds in which the learner waited for a full, fresh batch",
        "near 0",
        "more replicas",
    ),
    Metric(
        "time/generators_waited_s",
        "seconds in which no group was generated; under `placement: colocate` the learner's turn",
        "near 0 in other placements",
        "more learner ranks, or a larger `staleness.max_staleness`",
    ),
    Metric("time/step_s", "seconds of the learner's step, measured in the driver"),
    Metric(
        "time/rest_s, time/wake_s",
        "under `placement: colocate`: seconds until the generators rested before this step, and"
        " until they were awake again after the step before. On GPUs, also the seconds in which the"
        " learner takes and leaves the device",
        "well below `time/step_s`",
    ),
    Metric("time/event_loop_lag_s", "largest delay of the driver's event loop, in seconds"),
    Metric(
        "rollout/generated_tokens_per_s",
        "completion tokens per second of the groups that finished since the previous step",
    ),
    Metric(
        "control/outstanding, control/ready",
        "groups admitted without an outcome; those that are scored and wait for training",
        "`outstanding` near its limit in the plan",
    ),
    Metric(
        "control/running, control/concurrency",
        "groups in generation; their present limit under `rollout.adaptive_concurrency`",
        "the limit settles after some rounds",
        "if the limit holds the learner up: more KV cache, or shorter completions",
    ),
    Metric(
        "control/concurrency_grow, control/concurrency_trim, control/concurrency_cut",
        "decisions of the concurrency control so far: one group more; one group less, because the"
        " KV cache is nearly full or requests queue; a tenth less, after a preemption",
        "cuts are rare",
    ),
    Metric(
        "control/kv_use, control/engine_waiting, control/preemptions",
        "of the engine that finished a group last: share of its KV cache in use, completions in"
        " its queue, and completions so far that lost their KV cache to others",
        "0.8 to 0.92 when generation is the bottleneck; few waiting; below 0.05 preemptions per"
        " group",
        "a larger KV cache, or a smaller `rollout.max_concurrency`",
    ),
    Metric(
        "control/aborted_completions, control/aborted_tokens, control/aborted_by_length",
        "completions of abandoned requests so far; their tokens; their lengths (both without the"
        " engine's last 0.1 s), where item k counts lengths of 2^(k-1) to 2^k - 1 tokens and item 0"
        " counts empty completions",
        "0 under `on_stale: wait`, apart from deadlines",
        "`on_stale: wait`, or a larger `staleness.max_staleness`",
    ),
    Metric(
        "control/filtered_groups, control/dropped_groups, control/failed_groups",
        "groups with this outcome since the previous step",
    ),
    Metric(
        "control/wasted_tokens",
        "completion tokens so far of groups that were generated to their end and not trained,"
        " without their baselines",
        "few against the trained tokens",
        "`staleness.on_stale: wait`, or less over-sampling",
    ),
)

WEIGHTS = (
    Metric("replica", "`push`: the replica that this event is about"),
    Metric("weights/fetch_s", "`push`: seconds to fetch the version, while generation continued"),
    Metric(
        "weights/tokens_during_fetch",
        "`push`: completion tokens reported during the fetch; an engine can report them up to 0.1 s"
        " late, so a shorter fetch can show 0",
    ),
    Metric(
        "weights/pause_s",
        "`push`: seconds for which generation paused; 0 for an adapter (`lora`)",
    ),
    Metric(
        "weights/apply_s",
        "`push`: seconds of the copy, a part of the pause; of an adapter, seconds to write its"
        " files and load it",
    ),
    Metric(
        "weights/in_flight",
        "`push`: completions in flight at the pause; of an adapter, requests that continue with"
        " older ones",
    ),
    Metric(
        "weights/longest_gap_s",
        "`push`: longest time between two reports of new tokens by the engine, with completions in"
        " flight, since the previous push; this push's pause is included; up to 0.1 s is normal",
    ),
    Metric("weights/gather_s", "`gather`: seconds of the gather, measured in the driver"),
    Metric("weights/versions_passed_over", "`gather`: versions so far that were never published"),
    Metric("gather_s, bytes, buckets", "`gather`: the learner's own time, bytes and buckets"),
    Metric(
        "reference/refresh_s",
        "`gather`: seconds in which the reference policy took the version, if it was due"
        " (`algorithm.reference.update_interval`)",
    ),
    Metric(
        "weights/replicas, weights/unroutable",
        "`commit`: replicas that have the version, without one that an evaluation reserves;"
        " replicas that receive no requests",
    ),
    Metric(
        "check/logprob_max_diff, check/logprob_mean_diff, check/tokens",
        "`logprob_check`: largest and mean difference, in nats, between generators and learner at"
        " one version; tokens compared",
        "the largest (in bfloat16: the mean) below `weights.logprob_tolerance`",
        "the run ends",
    ),
)

EVALUATION = (
    Metric("eval/<set>_prompts", "prompts of the set"),
    Metric(
        "eval/<set>_accuracy, eval/<set>_scored",
        "mean of the reward `eval.accuracy` over the completions that it scored, where a late or"
        " failed completion counts as 0; the number of them",
    ),
    Metric(
        "eval/<set>_<name>, eval/<set>_<name>/<part>",
        "mean of each reward and of each of its parts, over the completions that it scored",
    ),
    Metric(
        "eval/<set>_unscored_ratio, eval/<set>_late_ratio, eval/<set>_failed_ratio",
        "share of completions whose reward is None; without an answer within"
        " `rollout.deadline_s`; that failed",
    ),
    Metric(
        "eval/<set>_completion_tokens, eval/<set>_truncated_ratio",
        "mean tokens of a completion; share of truncated completions",
    ),
    Metric(
        "eval/<set>_avg_at_<n>, eval/<set>_pass_at_<k>",
        "with n above 1: mean over n completions; unbiased estimate of pass@k (Chen et al. 2021)"
        " for k = 1, 2, 4, … and n. A completion passes at `eval.pass_threshold` or above",
    ),
    Metric("eval/accuracy, eval/prompts", "those of the first set"),
    Metric("eval/failed_ratio, eval/errors", "over all sets: late and failed; unexpected errors"),
    Metric(
        "eval/newest_version",
        "newest version among the tokens; above the record's version only under `eval.in_flight`",
    ),
    Metric("eval/seconds", "seconds of the evaluation"),
)

POSITION = (Metric("epoch, rows_taken", "passes over the data so far; rows or pairs of the step"),)

HELD_OUT = (
    Metric(
        "eval/loss",
        "mean negative log-likelihood per target token, in nats; for pairs, mean loss of a pair",
        "falls with the training loss",
        "a rise means that the model memorizes: stop earlier",
    ),
    Metric(
        "eval/exact_match",
        "share of held-out rows all of whose targets are the most probable tokens (teacher-forced)",
        "rises",
    ),
    Metric(
        "eval/pair_accuracy, eval/margin, eval/chosen_reward, eval/rejected_reward,"
        " eval/chosen_logprob, eval/rejected_logprob, eval/kl",
        "as `pref/…` of a step, on held-out pairs or completions",
    ),
    Metric("eval/tokens, eval/pairs, eval/completions", "target tokens; pairs; completions"),
    Metric("eval/evaluation_s", "seconds of the evaluation"),
)

START = (
    Metric(
        "startup/generators_s, startup/generator_import_s, startup/generator_config_s,"
        " startup/generator_engine_s, startup/generator_first_generation_s",
        "`startup`: seconds until the generators answer, and its parts: imports, vLLM's settings"
        " with its look at the model, the engine, and a first completion",
    ),
    Metric(
        "startup/learner_s, startup/learner_meet_s, startup/learner_engine_s",
        "`startup`: seconds until the learner is ready, and its parts",
    ),
    Metric(
        "startup/first_step_s, startup/phase/<phase>_s",
        "`first_step`: seconds from the command, or from the end of the last attempt, to the end of"
        " the first step of a run with generators; in each phase until then",
    ),
    Metric("startup/pause_empty_s", "`startup`: seconds of an update without weights"),
    Metric(
        "startup/generator_caches_removed, startup/learner_caches_removed",
        "`startup`: processes whose damaged compile caches were removed",
        "0",
    ),
    Metric("package/driver, package/replica", "`startup`: where each process found asyncrl"),
    Metric(
        "truncation/<file>/rows, truncation/<file>/used",
        "`truncation`: rows of the file; rows in use. A file is `data.train`, `eval.data`,"
        " `eval.sets.<set>.data`, `supervised_rows_of_warm_start.data` or"
        " `supervised_rows_of_eval.data`",
    ),
    Metric(
        "truncation/<file>/read, truncation/<file>/tokens, truncation/<file>/targets,"
        " truncation/<file>/longest",
        "`truncation` of a dataset: rows read; tokens and target tokens of the rows in use; tokens"
        " of the longest sequence",
    ),
    Metric(
        "truncation/<file>/cut_rows, truncation/<file>/cut_tokens, truncation/<file>/too_long",
        "`truncation` of a dataset: rows that `max_length` cut, their lost tokens, rows dropped",
    ),
    Metric(
        "truncation/<file>/unsuitable, truncation/<file>/malformed_<reason>",
        "`truncation` of a dataset: recorded groups whose rewards fit no row; rows dropped for the"
        " reason",
    ),
    Metric(
        "truncation/<file>/prompt_rows, truncation/<file>/prompt_tokens,"
        " truncation/<file>/prompt_dropped",
        "`truncation`: rows that `max_prompt_length` cut, their lost tokens, and rows dropped",
    ),
    Metric(
        "truncation/<file>/completion_rows, truncation/<file>/completion_tokens,"
        " truncation/<file>/completion_dropped",
        "`truncation`: the same for `max_completion_length`",
    ),
    Metric(
        "truncation/<file>/whole_rows, truncation/<file>/whole_tokens,"
        " truncation/<file>/whole_dropped",
        "`truncation`: the same for `max_length`",
    ),
    Metric(
        "truncation/<file>/no_completion, truncation/<file>/no_prompt",
        "`truncation`: rows refused because no completion or prompt token was left",
    ),
    Metric(
        "warm_start/accuracy, warm_start/loss, warm_start/learning_rate",
        "`warm_start`, after each check (`step` counts applied supervised steps): greedy held-out"
        " accuracy; loss in nats per token; learning rate",
    ),
    Metric(
        "warm_start/fill, warm_start/imbalance, warm_start/micro_batches",
        "`warm_start`: as in `step`, means since the previous check",
    ),
    Metric(
        "warm_start/pieces_left_out, warm_start/tokens_left_out",
        "`warm_start`: pieces cut by `warm_start.packing_strategy` that have no token to predict;"
        " target tokens that no piece predicts, since a piece's first token is only context",
    ),
)

OTHER = (
    Metric(
        "stage, waits_for, stall_s, workers",
        "`stall`: nothing moved for `observe.stall_s` seconds; the stage that hangs, what it waits"
        " for, the seconds so far, and each worker's state. The run is not ended",
    ),
    Metric(
        "note",
        "`kept_batch`: why the step's batch was kept, and its Parquet file in `kept/`",
    ),
    Metric(
        "errors, reason, stack",
        "`error`: an unexpected exception ended a group or an evaluation's completions; the count"
        " so far in the attempt (limit `rollout.max_errors`), one line, and the stack."
        " `evaluation_lost`: `reason` says why its replica is gone; the evaluation is repeated",
    ),
    Metric(
        "sessions, failed, times",
        "`failed_sessions`: sessions that were scored since the last such record; how many failed"
        " and are not trained; how many of these failed for the most frequent `reason`. It is"
        " written before a step, or at once if most sessions fail",
    ),
    Metric("alarm", "`alarm`: the line that the log shows"),
    Metric("checkpoint/save_s", "`checkpoint`: seconds to save it"),
)

TABLES = (
    MetricTable("Learner arithmetic", "step", STEP),
    MetricTable("Supervised and preference steps", "step", FIXED_ROWS),
    MetricTable("Position in a dataset", "step", POSITION),
    MetricTable("Held-out rows of a dataset", "evaluation", HELD_OUT),
    MetricTable("Staleness and rewards of the batch", "step", BATCH),
    MetricTable("Which side waits", "step", WAITING),
    MetricTable("Weights", "push, gather, commit, logprob_check", WEIGHTS),
    MetricTable("Evaluation", "evaluation", EVALUATION),
    MetricTable("Start and warm start", "startup, first_step, truncation, warm_start", START),
    MetricTable(
        "Other events",
        "stall, kept_batch, error, evaluation_lost, push_failed, failed_sessions, alarm,"
        " checkpoint",
        OTHER,
    ),
)


def known_names() -> frozenset[str]:
    """Every name in the catalog, with `<…>` where it varies."""
    return frozenset(
        name for table in TABLES for metric in table.metrics for name in metric.names.split(", ")
    )


@lru_cache(maxsize=4096)
def meaning_of(name: str) -> str:
    """What the catalog says of a metric as a sink names it, such as `train/loss`; empty if it does
    not know the name."""
    bare = name.partition("/")[2]
    for known, meaning in _meanings():
        if known.fullmatch(name) or known.fullmatch(bare):
            return meaning
    return ""


@cache
def _meanings() -> list[tuple[re.Pattern[str], str]]:
    """The pattern of each name and its meaning. Names with fewer parts that vary come first."""
    names = [
        (name, metric.meaning)
        for table in TABLES
        for metric in table.metrics
        for name in metric.names.split(", ")
    ]
    return [
        (re.compile("[^/]+".join(map(re.escape, re.split(r"<[^>]*>", name)))), meaning)
        for name, meaning in sorted(names, key=lambda known: known[0].count("<"))
    ]

"""Who tests the tests? Known bugs, planted one at a time: each must turn the theorem beside it red.

Most of them have been shipped by somebody. A bug is planted as text: the source of a function, with one passage
replaced, is compiled, and the function's code is swapped, so that everything that holds the function, under whatever
name, has the bug until it is taken out again.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import pytest

from nanorl import advantage, axes, checkpoint, critic, loss, metrics, objective, optimize, policy, sample, shaping, trpo
from nanorl.objective import Algorithm
from nanorl.policy import Policy
from tests import (
    test_advantage, test_algorithms, test_axes, test_checkpoint, test_critic, test_loss, test_metrics, test_policy,
    test_sample, test_shaping, test_trpo,
)  # fmt: skip


class Bug(NamedTuple):
    """In `function`, `right` becomes `wrong`, and then `theorem` fails."""

    name: str
    function: FunctionType
    right: str
    wrong: str
    theorem: Callable[[], None]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The function with the bug, for as long as this lasts."""
    source = inspect.getsource(bug.function)
    assert source.count(bug.right) == 1, f"{bug.function.__name__} should have exactly one {bug.right!r}"
    changed = textwrap.dedent(source.replace(bug.right, bug.wrong))
    code, made = compile(changed, bug.name, "exec", flags=__future__.annotations.compiler_flag), {}
    exec(code, bug.function.__globals__, made)
    sick = made[bug.function.__name__]
    healthy, bug.function.__code__ = bug.function.__code__, inspect.unwrap(getattr(sick, "fget", sick)).__code__
    try:
        yield
    finally:
        bug.function.__code__ = healthy


class Red(BaseException):
    """A theorem failed by what it asserts. No Exception, which hypothesis would catch and shrink the example."""


class Enough(BaseException):
    """A theorem has held in as many examples as were asked for."""


@contextmanager
def through(wrap: Callable[..., Callable[..., None]], theorem: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """The theorem with what it asserts wrapped: of one that hypothesis gives its examples, the test of each example."""
    generated = getattr(getattr(theorem, "func", theorem), "hypothesis", None)
    if generated is None:
        yield wrap(theorem)
        return
    inner, generated.inner_test = generated.inner_test, wrap(generated.inner_test)
    try:
        yield theorem
    finally:
        generated.inner_test = inner


def is_red(theorem: Callable[[], None]) -> bool:
    """Does the theorem fail by what it asserts? A crash is no proof, and is raised."""

    def telling(test: Callable[..., None]) -> Callable[..., None]:
        def told(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except (AssertionError, pytest.fail.Exception):  # the second is pytest.raises without an exception
                raise Red from None

        return told

    try:
        with through(telling, theorem) as told:
            told()
    except Red:
        return True
    return False


@cache
def prove(theorem: Callable[[], None]) -> None:
    """The theorem holds, found once, in five examples where hypothesis gives them: in its own file it has them all."""

    def few(test: Callable[..., None]) -> Callable[..., None]:
        numbers = itertools.count()

        def tried(*args, **kwargs):
            test(*args, **kwargs)
            if next(numbers) == 4:  # not before the sixth draws: hypothesis would miss what it drew the first time
                raise Enough

        return tried

    with suppress(Enough), through(few, theorem) as tried:
        tried()


T, L, A, S, X, N = test_algorithms, test_loss, test_advantage, test_sample, test_axes, test_trpo
C, K, M, P, H = test_checkpoint, test_critic, test_metrics, test_policy, test_shaping
EQUATION = T.test_every_row_is_its_equation_in_loss_and_gradient
TERMS = T.test_kl_and_entropy_are_added_to_every_row
COEFFICIENT = partial(T.test_the_coefficient_multiplies_the_surrogate_alone, "grpo")
REGION = N.test_an_accepted_step_stays_in_the_trust_region_and_improves_the_surrogate
FISHER = N.test_the_product_is_the_enumerated_fishers_of_a_transformer
LENGTH = N.test_the_length_is_solved_for_up_and_down
GSPO_PADDING = partial(T.test_padding_and_its_garbage_change_no_gradient, "gspo", "seq-mean-token-mean")
SPLIT = partial(T.test_no_split_into_micro_batches_or_ranks_changes_the_gradient, "grpo", "token-mean")
ROW = S.test_a_row_of_the_batch_is_its_sample_whatever_its_tokens_are
CONTRADICTION = S.test_a_sample_that_contradicts_itself_cannot_be_built
PAPERS = A.test_the_named_settings_are_the_papers
CLIP = partial(L.test_the_clip_flattens_what_goes_too_far_and_nothing_else, 0.2, 0.28)
OTHERS = L.test_every_other_loss_is_its_equation_in_value_and_gradient
JOINT = partial(L.test_the_joint_correction_makes_other_samples_mean_what_ones_own_would, 0)
BOUNDS = L.test_the_bounds_of_the_correction_are_those_of_pi_prox_over_mu_and_inclusive
CAP = partial(L.test_no_coefficient_passes_its_bounds, "truncate", "token")
MOMENT = L.test_the_second_moment_in_numbers
GREEDY = L.test_the_second_moment_drops_as_a_greedy_loop_does
LINE = L.test_loglinear_is_exact_where_log_probs_move_evenly
KL_VALUE = partial(L.test_k1_and_k3_are_unbiased_for_the_kl_and_k2_is_not, *L.PAIRS[0])
KL_GRADIENT = partial(L.test_what_the_gradient_of_each_kl_in_the_loss_descends, *L.PAIRS[0])
KL_REWARD = partial(L.test_what_the_gradient_of_each_kl_in_the_reward_descends, *L.PAIRS[0])
VALUE_CLIP = L.test_the_value_clip_stops_what_has_moved_towards_the_return_and_nothing_else
TABLE = L.test_the_weights_of_every_mode_are_the_tables
WIDTH = L.test_masked_columns_change_nothing
MASKED = L.test_fully_masked_rows_count_nowhere
PLACED = A.test_placed_is_its_equation_and_keeps_the_sum_of_each_row
LANDS = A.test_a_reward_goes_to_the_token_that_earned_it
TOOLS = A.test_gae_across_a_tools_answer_in_numbers
LAMBDA = A.test_limits_of_lambda
CENTRE = K.test_a_centred_critic_says_the_mean_return_of_a_sampled_token_everywhere_and_explains_nothing_yet
ONE_LEVEL = partial(L.test_for_answers_of_one_token_all_levels_are_one, "importance")


@cache
def surrogate(name: str, level: str = "token") -> Callable[[], None]:
    """The theorem that this surrogate at this level is its equation."""
    return partial(L.test_every_surrogate_at_every_level_is_its_equation_in_value_and_gradient, name, level)


@cache
def ratio(level: str) -> Callable[[], None]:
    """The theorem that the ratio of this level is its equation."""
    return partial(L.test_the_ratio_is_its_equation_in_value_and_gradient, level)


@cache
def normalise(mean: str, std: str, leave_one_out: bool = False) -> Callable[[], None]:
    """The theorem that normalising at these levels is its equation."""
    return partial(A.test_normalise_is_its_equation, dict(mean_level=mean, std_level=std, leave_one_out=leave_one_out))


@cache
def corrected(kind: str, level: str) -> Callable[[], None]:
    """The theorem that this correction is its equation."""
    return partial(L.test_the_correction_is_its_equation_and_has_no_gradient, kind, level)


@cache
def finite(name: str, dtype: str = "float32") -> Callable[[], None]:
    """The theorem that this loss is finite whatever comes in."""
    return partial(L.test_whatever_comes_in_what_comes_out_is_finite, name, getattr(L.torch, dtype))


@cache
def off_mask(name: str) -> Callable[[], None]:
    """The theorem that no NaN off the mask reaches this loss."""
    return partial(L.test_nothing_off_the_mask_reaches_value_or_gradient, name, L.NAN)


CENTRED = """(x - pooled(x.sum(1), mean_level) / n).where(contrast, 0.0)"""
LEAVE = """x = x * n / (n - 1).clamp(min=1) if leave_one_out else x"""

def in_folder(theorem: Callable[..., None], *args) -> None:
    """The theorem in an empty folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        theorem(Path(folder), *args)


def numbered() -> None:
    """The theorem about a reference whose tokens have other numbers, in an empty folder."""
    with pytest.MonkeyPatch.context() as patch:
        in_folder(P.test_a_reference_that_numbers_tokens_otherwise_is_refused_in_one_line, patch)


def entropy() -> None:
    """The entropy's theorem, a chunk of 3 tokens at a time."""
    with pytest.MonkeyPatch.context() as patch:
        P.test_entropy_is_that_of_the_models_own_distribution_in_value_and_gradient("llama", 3, patch)


BUGS = [
    # sample.py: what flows
    Bug("an end token that is also the pad token is never trained", sample.collate,
        "mask=rectangle([s.mask for s in samples], torch.bool)",
        "mask=rectangle([[m and i != 0 for m, i in zip(s.mask, s.ids)] for s in samples], torch.bool)", ROW),
    Bug("a group is known by its prompt's tokens", sample.collate, "[(g, s) for g, group in enumerate(groups)",
        "[([x.prompt.ids for x in groups].index(group.prompt.ids), s) for group in groups",
        S.test_identical_prompts_in_two_groups_stay_two_groups),
    Bug("every sample is a group of its own", sample.collate, "torch.tensor([g for g, _ in pairs])",
        "torch.arange(len(pairs))", ROW),
    Bug("a second reward at a position replaces the first", sample.collate, "+= value", "= value", ROW),
    Bug("a companion that is not to be trained on is", sample.collate, " if s.train]", "]",
        partial(S.test_an_incomplete_group_is_normalised_by_its_own_members, "grpo")),
    Bug("truncated is read off the length", sample.Batch.truncated.fget, 'self.finish == FINISH.index("length")',
        "self.length == self.ids.shape[1]", ROW),
    Bug("a sample can be built without versions", sample.Sample.__post_init__, "m != (v >= 0)", "v >= 0 and not m",
        partial(CONTRADICTION, dict(version=(-1, -1, -1)), "version")),
    Bug("the first token can be trained on", sample.Sample.__post_init__, "self.mask[0] or", "",
        partial(CONTRADICTION, dict(mask=(True, True, True), version=(2, 3, 4)), "first token")),
    Bug("a row is cut to the shortest", sample.Batch.select, "self.length[rows].max()", "self.length[rows].min()",
        S.test_select_takes_rows_whole_and_only_padding_is_cut),
    Bug("two draws instead of a permutation", sample.Batch.shuffle_into, ".permutation(len(self))",
        ".integers(0, len(self), len(self))", S.test_every_epoch_is_a_partition_into_equal_updates),
    Bug("the same order in every epoch", sample.Batch.shuffle_into, "(*key, epoch)", "key",
        S.test_shuffles_differ_by_epoch_and_key_and_one_update_is_not_shuffled),
    Bug("a micro-batch one row over its budget", sample.pack, "(i + 1 - start)", "(i - start)",
        S.test_pack_covers_every_length_once_within_the_budget_and_wastes_no_room),
    Bug("the last row is lost", sample.pack, "range(1, len(lengths) + 1)", "range(1, len(lengths))",
        S.test_pack_covers_every_length_once_within_the_budget_and_wastes_no_room),
    Bug("the denominator is the micro-batch's own", sample.Batch.split, "if self.local_mean:  #", "if True:  #", SPLIT),
    Bug("the mean of micro-batch means", sample.Batch.split, "if self.local_mean:  #", "if True:  #",
        S.test_the_mean_over_an_update_is_not_the_mean_of_its_micro_batches),
    Bug("bnpo adds its micro-batches instead of averaging them", sample.Batch.split, " / len(parts)", "",
        partial(T.test_bnpo_is_the_mean_over_micro_batches_of_their_token_means, "grpo")),
    Bug("the weights forget what is left out", sample.Batch.weighted, "weights(aggregation, self.counted.to",
        "weights(aggregation, (self.counted & self.keep).to",
        T.test_the_weights_of_the_others_count_the_rows_that_are_left_out),
    Bug("a dropped token keeps its loss", sample.Batch.weighted, "weight * self.keep", "weight",
        partial(S.test_keep_takes_tokens_away_and_leaves_the_others_weights, "token-mean")),
    # policy.py: what is scored
    Bug("the shift by one is forgotten", policy.before, "hidden[:, :-1]", "hidden[:, 1:]",
        S.test_logp_scores_the_token_it_stands_at_given_the_tokens_before_it),
    Bug("log-probs stand one place early", policy.scattered, "masked_scatter(mask, x)",
        "masked_scatter(mask.roll(-1, 1), x)",
        S.test_logp_scores_the_token_it_stands_at_given_the_tokens_before_it),
    Bug("an unnormalised score", Policy.score, "logits.logsumexp(1)", "logits.amax(1)",
        S.test_logp_is_a_distribution_over_the_next_token),
    # advantage.py: better than what
    Bug("the baseline is the batch's mean", advantage.normalise, CENTRED, CENTRED.replace("mean_level", '"batch"'),
        A.test_the_mean_is_the_groups_not_the_batchs),
    Bug("groups are slices of equal size", advantage.normalise, '{"group": group,',
        '{"group": (group * 0 + 1).cumsum(0).sub(1) // 2,', PAPERS),
    Bug("the std is always the group's", advantage.normalise, "/ freedom.clamp(min=1)).where(freedom > 0, 1.0)",
        "/ freedom.clamp(min=1)); variance = pooled(x.square().sum(1), 'group') / (pooled(tokens, 'group') - ddof)",
        PAPERS),
    Bug("the std is always the batch's", advantage.normalise, "pooled(x.square().sum(1), std_level)",
        'pooled(x.square().sum(1), "batch")', normalise("group", "group")),
    Bug("the std ignores its ddof", advantage.normalise, "- ddof", "- 1",
        partial(A.test_one_success_among_g_is_worth_its_rarity, 0)),
    Bug("ε stands under the root", advantage.normalise, "variance.sqrt() + eps", "(variance + eps).sqrt()",
        partial(A.test_near_constant_rewards_obey_the_equation, 1, 1e-6, "std")),
    Bug("δ stands outside of the root", advantage.normalise, "(variance + eps).sqrt()", "(variance.sqrt() + eps)",
        A.test_rows_of_the_papers_page_in_numbers),
    Bug("without a degree of freedom σ is 0", advantage.normalise, ".where(freedom > 0, 1.0)", "",
        normalise("none", "group")),
    Bug("leave-one-out without G/(G−1)", advantage.normalise, LEAVE, "x = x",
        A.test_leave_one_out_is_g_over_g_minus_1_of_centred),
    Bug("leave-one-out with the row itself in its baseline", advantage.normalise, LEAVE, "x = x",
        partial(A.test_expected_gradient_over_all_groups, "leave_one_out", 3)),
    Bug("everybody leaves one out", advantage.normalise, " if leave_one_out else x", "",
        partial(A.test_expected_gradient_over_all_groups, "centred", 3)),
    Bug("rounding of equal rewards becomes an advantage", advantage.normalise, ".where(contrast, 0.0)", "",
        partial(A.test_a_tenth_three_times_is_exactly_no_advantage, 3, L.torch.float64)),
    Bug("a row alone keeps its raw reward", advantage.normalise, CENTRED, CENTRED.replace("0.0", "x * (n == 1)"),
        A.test_a_row_alone_in_its_group_has_no_advantage),
    Bug("the mean over tokens is over the width", advantage.normalise, "mask.sum(1).to(x.dtype)",
        "mask.sum(1).to(x.dtype) * 0 + x.shape[1]", A.test_whitened_tokens_have_mean_0_and_variance_1),
    Bug("whitening gives every row the same weight", advantage.normalise, "pooled(x.sum(1), mean_level) / n",
        "pooled(x.sum(1) / tokens.clamp(min=1), mean_level) / pooled(tokens.clamp(max=1), mean_level).clamp(min=1)",
        A.test_whitened_tokens_have_mean_0_and_variance_1),
    Bug("NaN times a mask is credit", advantage.normalise, "x.where(mask, 0.0)", "x * mask",
        partial(A.test_nothing_off_the_mask_reaches_a_credit_or_its_gradient, "normalise batch batch", L.NAN)),
    Bug("a group has contrast if its first row differs", advantage.constant, '"amax", include_self=False',
        '"amin", include_self=False', A.test_constant_names_the_groups_without_contrast),
    Bug("the metric's std has no ddof", advantage.group_std, "(size - 1)", "size",
        A.test_sums_sizes_and_stds_are_numpys),
    Bug("a reward after the last sampled token is lost", advantage.placed, "column.where(mask, -1).cummax(1).values",
        "column", PLACED),
    Bug("a reward before the first sampled token is lost", advantage.placed,
        "last.where(last >= 0, mask.int().argmax(1, keepdim=True))", "last.clamp(min=0)", PLACED),
    Bug("a reward goes to the next sampled token", advantage.placed, "column.where(mask, -1).cummax(1).values",
        "column.where(mask, mask.shape[1]).flip(1).cummin(1).values.flip(1).clamp(max=mask.shape[1] - 1)", LANDS),
    Bug("of two rewards at a token one is kept", advantage.placed, "scatter_add(1", "scatter(1", PLACED),
    Bug("the reward stands at the last column", advantage.at_end, "placed(rewards, mask)", "rewards",
        A.test_at_end_is_the_last_sampled_token),
    Bug("a return discounted from the start of the answer", advantage.returns_to_go, "mask, gamma, 1.0)",
        "mask, gamma, 1.0) * gamma ** (mask.cumsum(1) - 1.0)", TOOLS),
    Bug("a return discounted by position", advantage.gae, "after = (delta + gamma * lam * after).where(sampled, after)",
        "after = gamma * lam * after + delta.where(sampled, 0.0)", TOOLS),
    Bug("an undiscounted return is what was earned so far", advantage.returns_to_go, ".flip(1).cumsum(1).flip(1)",
        ".cumsum(1)", A.test_returns_to_go_are_their_double_sum),
    Bug("V = 0 at a tool's tokens, and the recursion goes on", advantage.gae,
        "value_after = v.where(sampled, value_after)", "value_after = v.where(sampled, 0.0)", TOOLS),
    Bug("V of a tool's tokens is believed", advantage.gae, "v.where(sampled, value_after)", "v",
        A.test_tokens_of_others_neither_discount_nor_reset),
    Bug("a tool's answer ends the recursion", advantage.gae, ".where(sampled, after)", ".where(sampled, 0.0)", TOOLS),
    Bug("the value to come is not discounted", advantage.gae, "+ gamma * value_after - v", "+ value_after - v",
        A.test_gae_is_its_double_sum),
    Bug("λ without γ", advantage.gae, "gamma * lam * after", "lam * after", LAMBDA),
    Bug("V is added", advantage.gae, "value_after - v", "value_after + v", LAMBDA),
    Bug("the bootstrap is forgotten", advantage.gae, "after if bootstrap is None else bootstrap", "after",
        A.test_a_bootstrap_is_what_would_have_come),
    Bug("the bootstrap is an advantage too", advantage.gae, "value_after = after if bootstrap is None else bootstrap",
        "value_after = after = after if bootstrap is None else bootstrap", A.test_a_bootstrap_is_what_would_have_come),
    Bug("a row's mean is over its width", advantage.row_mean, "mask.sum(1, keepdim=True).clamp(min=1)", "mask.shape[1]",
        A.test_row_mean_is_its_loop),
    # loss.py: which way. The ratio
    Bug("NaN times a mask", loss.log_ratio, "(logp.where(mask, 0.0) - logp_old.where(mask, 0.0))",
        "((logp - logp_old) * mask)", off_mask("k3")),
    Bug("NaN times a mask, in the whole update", loss.log_ratio, "(logp.where(mask, 0.0) - logp_old.where(mask, 0.0))",
        "((logp - logp_old) * mask)", GSPO_PADDING),
    Bug("the ratio is bounded after the exp", loss.log_ratio, ".clamp(-bound, bound)", "", finite("k3")),
    Bug("the product over an answer has no bound", loss.ratio, "total.clamp(-BOUND, BOUND)", "total",
        finite("importance, joint")),
    Bug("GSPO's ratio without 1/n", loss.ratio, "total / mask.sum(1, keepdim=True).clamp(min=1)", "total",
        L.test_the_sequence_ratio_is_the_nth_root_of_the_joint_one),
    Bug("GSPO's ratio over the width", loss.ratio, "total / mask.sum(1, keepdim=True).clamp(min=1)",
        "total / mask.shape[1]", L.test_masked_columns_change_no_ratio_of_an_answer),
    Bug("the mean of ratios, not of their logs", loss.ratio, "log_s.exp().where(mask, 1.0)",
        "(log_r.exp().where(mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).where(mask, 1.0)",
        ratio("sequence")),
    Bug("GSPO-token's s has a slope as well", loss.ratio, "log_s.detach() + (own - own.detach())",
        "log_s + (own - own.detach())", ratio("sequence-token")),
    Bug("GSPO-token is GSPO", loss.ratio, "(log_s.detach() + (own - own.detach())).exp()", "log_s.exp()",
        partial(L.test_on_policy_every_surrogate_is_the_policy_gradient, "clip")),
    Bug("the ratio is 0 off the mask", loss.ratio, "total.clamp(-BOUND, BOUND).exp().where(mask, 1.0)",
        "total.clamp(-BOUND, BOUND).exp().where(mask, 0.0)", ratio("joint")),
    Bug("the ratio is upside down", loss.ratio, "log_r = log_ratio(logp, logp_old, mask)",
        "log_r = log_ratio(logp_old, logp, mask)", ONE_LEVEL),
    # surrogates
    Bug("max for min", loss.clipped, ".minimum(", ".maximum(", CLIP),
    Bug("a clip without the min", loss.clipped, "(ratio * adv).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * adv)",
        "ratio.clamp(1 - eps_low, 1 + eps_high) * adv", CLIP),
    Bug("the sides of the clip are swapped", loss.clipped, "ratio.clamp(1 - eps_low, 1 + eps_high)",
        "ratio.clamp(1 - eps_high, 1 + eps_low)", CLIP),
    Bug("the loss is maximised", loss.clipped, "(-surrogate)", "surrogate", surrogate("clip")),
    Bug("min for max in the dual clip", loss.clipped, "surrogate.maximum(", "surrogate.minimum(", CLIP),
    Bug("the dual clip for better answers", loss.clipped, "adv >= 0", "adv <= 0", surrogate("dual clip")),
    Bug("the dual clip is always on", loss.clipped, "if dual_clip is not None:\n        ",
        "dual_clip = dual_clip or 3.0\n    if True:\n        ", CLIP),
    Bug("the dual clip's bound is c − 1", loss.clipped, "dual_clip * adv", "(1 + dual_clip) * adv", CLIP),
    Bug("REINFORCE climbs down", loss.reinforce, "-adv.where(mask, 0.0)", "adv.where(mask, 0.0)",
        partial(A.test_expected_gradient_over_all_groups, "none", 2)),
    Bug("an advantage off the mask is used", loss.reinforce, "-adv.where(mask, 0.0)", "-adv", off_mask("reinforce")),
    Bug("TRPO's surrogate is REINFORCE's", loss.importance, "-ratio.where(mask, 0.0)",
        "-(1 + ratio.log()).where(mask, 0.0)", L.test_limits_of_the_clips),
    Bug("SAPO's temperatures are swapped", loss.sapo, "tau_neg).masked_fill(adv > 0, tau_pos)",
        "tau_pos).masked_fill(adv > 0, tau_neg)", surrogate("sapo, far apart")),
    Bug("SAPO without 4/τ", loss.sapo, "4 / tau * (", "(",
        partial(L.test_on_policy_every_surrogate_is_the_policy_gradient, "sapo, far apart")),
    Bug("SAPO with 2/τ", loss.sapo, "4 / tau * (", "2 / tau * (", L.test_as_tau_vanishes_sapo_is_the_importance_weight),
    Bug("SAPO's gate is centred on 0", loss.sapo, "ratio.where(mask, 1.0) - 1", "ratio.where(mask, 1.0)",
        surrogate("sapo")),
    # samples of another policy
    Bug("the importance weight is squared", loss.correction, "mask, level)", "mask, level).square()", JOINT),
    Bug("a token's weight for the answer's", loss.correction, "mask, level)", 'mask, "token")', JOINT),
    Bug("the correction has a gradient", loss.correction, "mask, level).detach()", "mask, level)",
        corrected("truncate", "token")),
    Bug("the correction is upside down", loss.correction, "ratio(logp_prox, logp_behave, mask, level)",
        "ratio(logp_behave, logp_prox, mask, level)", BOUNDS),
    Bug("the bounds are the inverse ratio's", loss.correction, "(rho >= low) & (rho <= high)",
        "(1 / rho >= low) & (1 / rho <= high)", BOUNDS),
    Bug("the bounds are exclusive", loss.correction, "(rho >= low) & (rho <= high)", "(rho > low) & (rho < high)",
        BOUNDS),
    Bug("masking without the weight", loss.correction, "rho * ((", "1.0 * ((", corrected("mask", "token")),
    Bug("what is tested is not what is used: the weight stays unbounded", loss.correction, "rho.clamp(low, high)",
        "rho", CAP),
    Bug("an answer passes by its mean, its tokens keep their weights", loss.correction,
        "return rho * ((rho >= low) & (rho <= high))",
        'return ratio(logp_prox.detach(), logp_behave, mask) * ((rho >= low) & (rho <= high))',
        partial(L.test_no_coefficient_passes_its_bounds, "mask", "sequence")),
    Bug("a lower clamp that nobody asked for", loss.correction, "rho.clamp(low,", "rho.clamp(max(low, 0.5),",
        corrected("truncate", "token")),
    Bug("the second moment over all tokens", loss.second_moment, "mask & (adv * log_rho > 0)", "mask & (log_rho != 0)",
        MOMENT),
    Bug("the second moment of what is pushed back", loss.second_moment, "adv * log_rho > 0", "adv * log_rho < 0",
        MOMENT),
    Bug("a token may always stay", loss.second_moment, "return mask & (kept | ~moved)",
        "kept.view(-1)[place[:1]] = True\n    return mask & (kept | ~moved)", MOMENT),
    Bug("a second moment at its threshold is kept", loss.second_moment, "scatter(0, place, mean < threshold)",
        "scatter(0, place, mean <= threshold)", MOMENT),
    Bug("a bound on each token for the bound on the mean", loss.second_moment,
        "square.cumsum(0) / square.new_ones(square.shape).cumsum(0)", "square", MOMENT),
    Bug("the smallest go first", loss.second_moment, 'float("inf")).flatten().sort()',
        'float("-inf")).flatten().sort(descending=True)', GREEDY),
    Bug("loglinear's α is the other end's", loss.loglinear, "(lag / (lag + done)", "(done / (lag + done)", LINE),
    Bug("versions one late", loss.loglinear, "lag = lag.to(logp.dtype)", "lag = lag.to(logp.dtype) - 1", LINE),
    Bug("the interpolated past has a gradient", loss.loglinear, "log_ratio(logp.detach(),", "log_ratio(logp,",
        L.test_loglinear_is_its_line),
    Bug("α in the default dtype", loss.loglinear, "lag = lag.to(logp.dtype)", "lag = lag.float()",
        L.test_loglinear_is_its_line),
    # regularisers
    Bug("the KL's log ratio is upside down: value", loss.kl, "log_ratio(logp, logp_ref, mask)",
        "log_ratio(logp_ref, logp, mask)", KL_VALUE),
    Bug("the KL's log ratio is upside down: gradient", loss.kl, "log_ratio(logp, logp_ref, mask)",
        "log_ratio(logp_ref, logp, mask)", KL_GRADIENT),
    Bug("the KL's log ratio is upside down: a reward for drifting", loss.kl, "log_ratio(logp, logp_ref, mask)",
        "log_ratio(logp_ref, logp, mask)", KL_REWARD),
    Bug("k3 inverted", loss.kl, "(-d).expm1() + d", "d.expm1() - d", KL_VALUE),
    Bug("k3 for k2", loss.kl, "d.square() / 2", "(-d).expm1() + d", KL_GRADIENT),
    Bug("k1 for k2: a loss that pulls nowhere", loss.kl, "d.square() / 2", "d", KL_GRADIENT),
    Bug("k2 without ½", loss.kl, "d.square() / 2", "d.square()", KL_GRADIENT),
    Bug("k3+ with the gradient of k3", loss.kl, "k2 + (k3 - k2).detach()", "k3", KL_GRADIENT),
    Bug("k3+ with the value of k2", loss.kl, "k2 + (k3 - k2).detach()", "k2", KL_VALUE),
    Bug("exp(−d) − 1 loses its digits", loss.kl, "(-d).expm1() + d", "(-d).exp() - 1 + d",
        L.test_k3_keeps_its_digits_where_the_policies_nearly_agree),
    # the critic
    Bug("the value clip with min", loss.value_loss, "worst.maximum(", "worst.minimum(", VALUE_CLIP),
    Bug("the value is clipped to the return", loss.value_loss, "value_old + (value - value_old).clamp(-clip, clip)",
        "returns + (value - returns).clamp(-clip, clip)", VALUE_CLIP),
    Bug("the value clip without its unclipped half", loss.value_loss, "worst.maximum(loss(value_old", "(loss(value_old",
        VALUE_CLIP),
    Bug("the critic's error without ½", loss.value_loss, "size - near / 2", "size", OTHERS),
    Bug("Huber's corner jumps", loss.value_loss, "near * (size - near / 2)", "near * size / 2",
        L.test_hubers_pull_is_the_error_held_within_delta),
    Bug("a value off the mask is fitted", loss.value_loss, "returns.where(mask, 0.0)", "returns", off_mask("value")),
    # how losses are added up
    Bug("the mean over tokens is over the rectangle", loss.weights, "return m / m.sum().clamp(min=1)",
        "return m / m.numel()", WIDTH),
    Bug("the mean over an answer is over the width", loss.weights, "m / (rows * tokens.clamp(min=1))[:, None]",
        "m / (rows * m.shape[1])", WIDTH),
    Bug("Dr.GRPO divides by the width of the batch", loss.weights, "m / (rows * length_limit)",
        "m / (rows * m.shape[1])", WIDTH),
    Bug("Dr.GRPO forgets the constant", loss.weights, "m / (rows * length_limit)", "m / rows", TABLE),
    Bug("a fully masked row counts as an answer", loss.weights, "(tokens > 0).sum().clamp(min=1)", "len(m)", MASKED),
    Bug("a fully masked prompt counts as a prompt", loss.weights, "(per_prompt > 0).sum().clamp(min=1)", "len(ids)",
        MASKED),
    Bug("the token-mean is a mean of means", loss.weights, "return m / m.sum().clamp(min=1)",
        "return m / (rows * tokens.clamp(min=1))[:, None]", L.test_the_mean_of_means_is_not_the_mean),
    Bug("a prompt's mean is over its answers", loss.weights, "per_prompt.clamp(min=1)[place]", "tokens.clamp(min=1)",
        TABLE),
    # objective.py: which combination
    Bug("π_prox is not held fixed", objective.proximal, "return logp.detach()", "return logp",
        partial(T.test_before_the_first_update_every_row_is_reinforce, "grpo")),
    Bug("the behaviour's log-probs stand for π_prox's", objective.proximal, "return micro.logp_prox",
        "return micro.logp_behave", partial(EQUATION, "grpo", 5, 0.5)),
    Bug("a token's version is labelled one late", objective.proximal, "micro.step - micro.version",
        "(micro.step - micro.version - 1).clamp(min=0)", partial(EQUATION, "decoupled_loglinear", 5, 0.5)),
    Bug("the correction disappears with a KL term", Algorithm.loss, "if axes.correction.on:",
        "if axes.correction.on and not axes.kl_weight:", COEFFICIENT),
    Bug("the correction multiplies the KL too", Algorithm.loss, "per_token + axes.kl_weight * distance",
        "per_token + axes.kl_weight * distance * L.correction(prox, micro.logp_behave, mask, **vars(axes.correction))",
        COEFFICIENT),
    Bug("the unbiased KL's ratio is the answer's (D21)", Algorithm.loss, "L.ratio(logp, micro.logp_behave, mask) * distance",
        "L.ratio(logp, micro.logp_behave, mask, axes.ratio_level) * distance", partial(TERMS, "gspo", "rk3")),
    Bug("the unbiased KL's ratio is to π_prox", Algorithm.loss, "L.ratio(logp, micro.logp_behave, mask) * distance",
        "L.ratio(logp, prox, mask) * distance", partial(TERMS, "grpo", "rk3")),
    Bug("entropy is fought", Algorithm.loss, "per_token - axes.entropy_weight", "per_token + axes.entropy_weight",
        partial(TERMS, "grpo", "k2")),
    Bug("a ratio of the answer meets each token's advantage", Algorithm.pull, "A.row_mean(batch.adv, batch.mask) if whole else ",
        "", partial(T.test_a_ratio_of_the_whole_answer_multiplies_its_mean_advantage, 5, "sequence")),
    Bug("no reference is a reference of zeros, in the loss", Algorithm.loss, "L.kl(logp, micro.logp_ref, mask",
        "L.kl(logp, logp * 0 if micro.logp_ref is None else micro.logp_ref, mask",
        partial(T.test_without_a_reference_there_is_no_kl_term, "grpo")),
    Bug("no reference is a reference of zeros, in the reward (D12)", Algorithm.rewards,
        "L.kl(batch.logp_behave, batch.logp_ref, mask",
        "L.kl(batch.logp_behave, 0.0 * mask if batch.logp_ref is None else batch.logp_ref, mask",
        partial(T.test_without_a_reference_there_is_no_kl_term, "ppo")),
    Bug("the KL is a reward", Algorithm.rewards, "reward - axes.kl_weight", "reward + axes.kl_weight",
        partial(T.test_k1_in_the_reward_has_the_gradient_of_the_kl, "reinforce", 0.1)),
    Bug("the KL is normalised with the reward", Algorithm.rewards, "total = shaping.whole(batch, axes)[:, None]",
        "total = (batch.reward - (batch.logp_behave - batch.logp_ref).where(mask, 0.0).sum(1))[:, None]",
        partial(T.test_the_kl_in_the_reward_is_nothing_where_the_policies_agree_and_comes_after_normalisation, "rloo")),
    Bug("the KL in the reward has no bound", Algorithm.rewards, "distance.clamp(-10, 10)", "distance",
        T.test_the_kl_in_the_reward_is_bounded_for_each_token),
    Bug("rewards are normalised token by token", Algorithm.rewards, "reward = A.at_end(total[:, 0], mask)",
        "reward = A.normalise(A.placed(batch.rewards, mask), mask, batch.group, **vars(axes.reward_norm))",
        partial(EQUATION, "grpo", 5, 0.5)),
    Bug("the critic's targets are whitened", Algorithm.advantage, "if axes.adv_norm.on else adv), returns",
        "if axes.adv_norm.on else adv), A.normalise(returns, mask, batch.group, **vars(axes.adv_norm))",
        partial(T.test_the_critics_targets_are_not_whitened, "ppo", {})),
    Bug("the critic's targets are whitened: the whole row", Algorithm.advantage, "if axes.adv_norm.on else adv), returns",
        "if axes.adv_norm.on else adv), A.normalise(returns, mask, batch.group, **vars(axes.adv_norm))",
        partial(EQUATION, "ppo", 5, 0.5)),
    Bug("a truncated answer's bootstrap is forgotten", Algorithm.advantage, ", batch.bootstrap)", ")",
        T.test_a_truncated_answer_is_bootstrapped_where_asked_for),
    Bug("rewards of turns are lumped at the end", Algorithm.rewards, "shaping.shaped(batch, axes)",
        "A.at_end(batch.reward, mask)", T.test_a_reward_stays_with_the_token_that_earned_it_unless_it_is_normalised),
    Bug("rows without advantage lose their entropy bonus", Algorithm.keep, "axes.entropy_weight or ", "",
        partial(T.test_with_a_kl_or_an_entropy_term_rows_without_advantage_stay_and_matter, "grpo", dict(entropy_weight=0.1))),
    Bug("rows without advantage lose their KL", Algorithm.keep, 'axes.kl_weight and axes.kl_in == "loss"', "False",
        partial(T.test_with_a_kl_or_an_entropy_term_rows_without_advantage_stay_and_matter, "grpo", dict(kl_weight=0.1))),
    Bug("the critic does not learn from rows without advantage", Algorithm.keep, "self.critic or ", "",
        T.test_the_critic_learns_from_rows_without_advantage),
    Bug("rows without advantage cost a pass", Algorithm.keep, "batch.adv.ne(0)", "(batch.adv == batch.adv)",
        partial(T.test_rows_without_advantage_are_left_out_and_the_gradient_does_not_notice, "grpo")),
    Bug("only better answers are learnt from", Algorithm.keep, "batch.adv.ne(0)", "batch.adv.gt(0)",
        partial(EQUATION, "grpo", 5, 0.5)),
    Bug("M2PO drops what goes against the advantage", Algorithm.keep, "L.log_ratio(batch.logp_prox, batch.logp_behave,",
        "L.log_ratio(batch.logp_behave, batch.logp_prox,", partial(EQUATION, "m2po", 5, 0.5)),
    Bug("M2PO divides by what is left (D13)", sample.Batch.weighted, "weights(aggregation, self.counted.to",
        "weights(aggregation, (self.counted & self.keep).to", T.test_a_token_that_m2po_drops_leaves_the_others_weights),
    Bug("a second epoch is taken for on-policy", Algorithm.needs, "cfg.updates_per_batch * cfg.epochs_per_batch",
        "cfg.updates_per_batch", T.test_later_updates_need_the_old_policy),
    Bug("a KL term forgets its reference", Algorithm.needs, '{"logp_ref"} if axes.kl_weight else set()', "set()",
        partial(T.test_what_is_needed_is_what_is_read, "ppo", 1)),
    Bug("the weight of the critic's loss is not passed on", Algorithm.value_loss, "critic.weight * ", "",
        partial(X.test_no_option_is_dead, "critic.weight")),
    Bug("unscaled advantages beside ratios of answers are passed over", Algorithm.remarks,
        'and "none" == axes.reward_norm.std_level == axes.adv_norm.std_level:', "and False:",
        X.test_ratios_of_answers_with_unscaled_advantages_are_remarked),
    Bug("a token's clip for the answer's is passed over", Algorithm.remarks, "whole and axes.eps_high >= 0.1", "False",
        partial(X.test_what_is_mostly_a_mistake_is_remarked_and_not_refused, "gspo --eps-high 0.2",
                ["ε = 0.2 is a token's clip"])),
    Bug("the constant length is always the longest answer's", Algorithm.limit, "self.axes.length_limit or ", "",
        T.test_the_constant_length_is_its_own_or_that_of_the_longest_answer),
    Bug("the first loss is explained where it is none of −Σ weight·A", Algorithm.explained.fget,
        "self.surrogate in (clipped, importance) and ", "", partial(T.test_the_first_loss_is_what_is_explained, "rloo", {})),
    Bug("M2PO drops tokens under an entropy bonus", Algorithm.refuse, "or axes.entropy_weight or", "or",
        partial(X.test_what_a_row_cannot_do_is_refused_with_the_reason, "m2po --entropy-weight 0.1", "--m2-threshold: it")),
    Bug("SAPO takes the decoupled objective", Algorithm.refuse, "if self.surrogate is sapo and", "if False and",
        partial(X.test_what_a_row_cannot_do_is_refused_with_the_reason, "sapo --correction.kind truncate",
                "--correction.kind, --prox: SAPO's gate")),
    Bug("a flag that nothing reads is taken", Algorithm.unused, 'set() if self.critic else {"critic"}', "set()",
        partial(X.test_what_a_row_cannot_do_is_refused_with_the_reason, "grpo --critic.clip 0.2", "--critic.clip: grpo does")),
    Bug("missing log-probs are trained on", Algorithm.refuse_samples, "mask and math.isnan(logp)", "False",
        partial(X.test_a_token_without_its_log_prob_is_refused_where_it_is_divided_by, "m2po", {})),
    # axes.py
    Bug("k1 is a loss", axes.wrong, 'axes.kl_estimator == "k1"', 'axes.kl_estimator == "k0"',
        partial(X.test_axes_that_contradict_each_other_are_wrong, X.K1, "--kl-estimator k1")),
    Bug("a clip may be NaN", axes.wrong, "0 <= axes.eps_low < 1", "not (axes.eps_low < 0 or axes.eps_low >= 1)",
        partial(X.test_no_axis_takes_what_is_no_number_or_negative, "eps_low", X.NAN)),
    # trpo.py: the natural gradient step
    Bug("the step costs half of what it may", trpo.full_step, "2 * delta", "delta",
        N.test_the_step_of_a_bandit_is_the_closed_form),
    Bug("the damping shortens the step", trpo.natural_step, "full_step(x, fisher,",
        "full_step(x, lambda v: fisher(v) + trust.damping * v,",
        partial(N.test_the_full_step_costs_what_it_should, 0, 1.0)),
    Bug("the KL is the other way round", trpo.categorical_kl, "(logp.exp() * (logp - logq))",
        "(logq.exp() * (logq - logp))",
        REGION),
    Bug("rows without advantage may go anywhere", trpo.over_tokens, "batch.counted.to(batch.weight.dtype) / batch.counted.sum()",
        "batch.keep.to(batch.weight.dtype) / batch.keep.sum()",
        REGION),
    Bug("the KL is a sum over tokens", trpo.over_tokens, " / batch.counted.sum()", "", FISHER),
    Bug("π_old moves with the policy", trpo.divergences, "logp.detach()", "logp", FISHER),
    Bug("the last micro-batch's curvature alone", trpo.hessian_product, "total += flat", "total = flat",
        partial(N.test_no_split_into_micro_batches_changes_the_step, 12)),
    Bug("conjugate gradient's β is upside down", trpo.conjugate_gradient, "square / previous *", "previous / square *",
        N.test_after_n_products_conjugate_gradient_has_solved_the_system),
    Bug("steepest descent for conjugate gradient", trpo.conjugate_gradient, " + square / previous * direction", "",
        N.test_after_k_products_it_has_the_best_of_the_krylov_space_and_says_what_is_left),
    Bug("a step outside of the region is accepted", trpo.line_search, "spent <= delta and ", "", LENGTH),
    Bug("the KL grows as s, not as s²", trpo.line_search, "math.sqrt(0.95 / max(spent / delta, 1e-4))",
        "0.95 / max(spent / delta, 1e-4)", LENGTH),
    Bug("any step in the region will do", trpo.line_search, "(gained := gain(s)) > 0", "(gained := gain(s)) > -math.inf",
        N.test_a_step_that_makes_the_surrogate_worse_is_not_taken),
    Bug("a rejected step is left where it was tried", trpo.natural_step, "        go(s)\n", "",
        N.test_a_rejected_step_leaves_the_weights_bit_for_bit),
    Bug("the way back is 0 times the step", trpo.line, " if s else old", "",
        N.test_the_way_back_is_exact_whatever_the_step_holds),
    Bug("downhill", trpo.natural_step, "g = -flat", "g = flat", REGION),
    Bug("a step of NaN", trpo.natural_step, "if norm == 0 or not math.isfinite(norm):", "if norm == 0:",
        partial(N.test_without_a_finite_gradient_there_is_no_step, L.NAN, L.NAN)),
    Bug("the first rows alone", trpo.natural_step, "len(rows) - 1, max(",
        "max(0, round(trust.share * len(rows)) - 1), max(",
        N.test_half_of_the_rows_of_a_doubled_batch_have_its_fisher_matrix),
    Bug("the bound is on the rows of the share alone", trpo.natural_step, "spent_kl(go, s, policy, everything,",
        "spent_kl(go, s, policy, some,", REGION),
    Bug("F is always of all rows", trpo.natural_step, "divergences(policy, some,", "divergences(policy, everything,",
        N.test_rows_without_advantage_shape_the_step_unless_they_are_left_out_of_the_share),
    Bug("the KL is a mean of micro-batches where the loss is", trpo.over_tokens, ", local_mean=False", "",
        N.test_the_region_is_that_of_all_tokens_alike_where_each_micro_batch_of_the_loss_has_a_mean_of_its_own),
    Bug("a product that leaves a larger residual is not taken", trpo.conjugate_gradient, "x + length * direction,",
        "x + length * direction * ((residual - length * curved).norm() <= residual.norm()),",
        N.test_each_product_adds_to_the_gain_of_the_full_step_whatever_the_residual_does),
    Bug("the share holds rows without tokens", trpo.natural_step, "update.counted.any(1).nonzero()[:, 0]",
        "torch.arange(len(update))", N.test_a_row_without_tokens_is_no_share),
    # critic.py: what is to be expected
    Bug("a value has seen its token", policy.before, "[:, :-1]", "[:, 1:]",
        partial(K.test_the_value_of_a_token_is_that_of_the_prefix_before_it_alone, "own")),
    Bug("the value of a row is read at the end of its padding", critic.Critic.forward, "batch.length[:, None] - 1",
        "0 * batch.length[:, None] - 1 + batch.ids.shape[1]",
        partial(K.test_padding_changes_nothing_whatever_it_holds_and_however_wide_it_is, "shared")),
    Bug("the critic begins at the mean of answers, not of tokens", critic.centre.__wrapped__,
        "returns.sum() / max(1, len(returns))", "batch.reward.mean()", partial(CENTRE, "own", {})),
    Bug("the critic begins at what was earned before it was normalised and the KL taken out", critic.centre.__wrapped__,
        "algo.rewards(batch)", "batch.rewards", partial(CENTRE, "own", {"reward_norm.mean_level": "batch", "kl_weight": 0.3})),
    Bug("the critic begins at the undiscounted return", critic.centre.__wrapped__, ", algo.axes.gamma)", ")",
        partial(CENTRE, "own", {"gamma": 0.8})),
    Bug("a shared trunk does not learn from the critic", critic.Critic.forward, "self.head(hidden.to(",
        "self.head(hidden.detach().to(",
        partial(K.test_the_values_gradient_reaches_the_policy_through_a_shared_trunk_and_only_then, "shared")),
    Bug("answers that ended are bootstrapped too", critic.valued.__wrapped__, "end * batch.truncated if", "end if",
        K.test_the_bootstrap_is_the_value_of_the_whole_row_where_it_was_truncated_and_zero_elsewhere),
    Bug("values of a micro-batch stand in the first rows", critic.valued.__wrapped__,
        "value[micro.row, : v.shape[1]], end", "value[: len(v), : v.shape[1]], end",
        partial(K.test_values_are_the_same_in_passes_of_any_size_and_carry_no_gradient, "own", 20)),
    # shaping.py: what becomes of a reward before it is compared
    Bug("an overlong answer loses ever more", shaping.overlong, ".clamp(0, margin)", ".clamp(min=0)",
        H.test_the_penalty_is_dapos_at_its_own_numbers_and_has_a_floor),
    Bug("the bias comes after the scale", shaping.scaled, 'if form == "code" else', 'if form == "page" else',
        H.test_both_forms_of_bias_and_scale_have_their_stated_values),
    Bug("rewards are clipped before they are scaled", shaping.stages, "scaled(reward, how.bias",
        "scaled(clipped(reward, how.clip or 1e9), how.bias", H.test_each_step_is_its_equation_and_nothing_is_overwritten),
    Bug("the bias is added at every turn", shaping.shaped, "masked_fill(batch.truncated[:, None] & fixed, 0.0) *",
        "masked_fill(batch.truncated[:, None] & fixed, 0.0).add(axes.shaping.bias).where(batch.mask, 0.0) *",
        H.test_each_turn_is_scaled_where_it_stands_and_the_bias_is_added_once_at_the_end),
    Bug("a dropped answer stays in the baseline", shaping.compared, 'axes.truncated != "drop"', "True",
        partial(H.test_dropped_answers_are_as_if_they_had_never_been, "grpo", 1)),
    Bug("masked answers leave the baseline", shaping.compared, 'axes.truncated != "drop"', 'axes.truncated == "score"',
        H.test_the_reward_of_a_masked_answer_is_felt_and_that_of_a_dropped_one_is_not),
    Bug("the tokens of a masked answer stay in the weights", sample.Batch.weighted, "self.counted", "self.mask",
        partial(H.test_what_is_left_out_counts_in_no_weight, "mask", "token-mean")),
    Bug("what is left out is kept", Algorithm.keep, "self.axes, batch.counted", "self.axes, batch.mask",
        partial(H.test_masked_answers_stay_in_the_baseline, "grpo_deepseekmath")),
    # policy.py
    Bug("the entropy is the surprise of the sampled token", policy.Policy.score_and_entropy,
        "-(every.exp() * every).sum(1)", "-every.gather(1, token[:, None])[:, 0]", entropy),
    Bug("rows that are asked for stand in their order", policy.scored, "out[micro.row, : micro.ids.shape[1]]",
        "out[: len(micro), : micro.ids.shape[1]]",
        partial(P.test_whatever_the_order_in_which_rows_are_asked_for_each_gets_its_own_scores_and_the_others_none, 10**6)),
    Bug("the reference numbers tokens in its own way", policy.frozen,
        "any(ids.get(token, number) != number for token, number in tokenizer.get_vocab().items())", "False",
        numbered),
    Bug("the reference can be trained", policy.frozen, ".requires_grad_(False)", "",
        partial(in_folder, P.test_the_reference_is_the_model_of_its_folder_at_the_policys_temperature_and_never_trained)),
    Bug("the reference is scored at temperature 1", policy.frozen, "policy.temperature, policy.dtype", "1.0, policy.dtype",
        partial(in_folder, P.test_the_reference_is_the_model_of_its_folder_at_the_policys_temperature_and_never_trained)),
    # optimize.py: how the weights are moved
    Bug("moments gather while the rate is 0", optimize.clip_and_step, " and lr > 0", "",
        P.test_a_rate_of_0_is_no_step_so_that_moments_do_not_gather_what_is_not_followed),
    # metrics.py: what a step says
    Bug("what a critic explains is taken of whitened advantages", metrics.step_metrics, "(batch.returns - batch.value)[batch.counted]",
        "batch.adv[mask]", M.test_explained_is_the_share_of_the_variance_of_returns_that_the_value_takes_away),
    Bug("an answer's clip is told by its tokens' advantages", metrics.clip_shares,
        "algo.pull(batch)[trained]", "batch.adv[trained]",
        M.test_an_answer_is_clipped_as_a_whole_by_its_mean_advantage),
    Bug("the ratio is always to π_prox", metrics.trained_ratio, 'batch.logp_behave if algo.axes.prox == "behave" else start',
        "start", M.test_the_old_policy_is_the_sampler_where_the_algorithm_says_so),
    Bug("an interpolated π_prox is taken for a measured one", metrics.step_metrics, "if updates > 1 and", "if False and",
        M.test_where_π_prox_was_interpolated_nothing_is_said_about_it),
    Bug("a π_prox that moved away is taken for the policy", metrics.step_metrics, "if updates > 1 and",
        'if algo.axes.prox == "loglinear" and updates > 1 and',
        M.test_where_π_prox_moved_away_unmeasured_only_what_is_told_by_the_sampler_is_said),
    # checkpoint.py: going on
    Bug("a resumed optimizer begins with moments of zero", checkpoint.save, "value.contiguous()", "0 * value",
        partial(in_folder, C.test_every_part_comes_back_bitwise_each_from_its_own_files)),
    Bug("a resumed run has a fresh critic", checkpoint.restore.__wrapped__, "for part, pairs, state in found:",
        "for part, pairs, state in found[:1]:",
        partial(in_folder, C.test_every_part_comes_back_bitwise_each_from_its_own_files)),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_turns_its_theorem_red_and_its_absence_green(bug):
    with planted(bug):
        assert is_red(bug.theorem)
    prove(bug.theorem)

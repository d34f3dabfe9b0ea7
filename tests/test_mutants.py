"""Who tests the tests? Known bugs, planted one at a time: each must turn the theorem beside it red.

Most of them have been shipped by somebody. A bug is planted as text: the source of a function, with one passage
replaced, is compiled, and the function's code is swapped, so that everything that holds the function, under whatever
name, has the bug until it is taken out again.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import NamedTuple

import pytest

from nanorl import advantage, algorithms, loss, sample
from nanorl.policy import Policy
from tests import test_advantage, test_algorithms, test_loss, test_sample


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
    healthy, bug.function.__code__ = bug.function.__code__, getattr(sick, "fget", sick).__code__
    try:
        yield
    finally:
        bug.function.__code__ = healthy


class Red(BaseException):
    """A theorem failed by what it asserts. No Exception, which hypothesis would catch and shrink the example."""


def is_red(theorem: Callable[[], None]) -> bool:
    """Does the theorem fail by what it asserts? A crash is no proof, and is raised."""

    def telling(test: Callable[..., None]) -> Callable[..., None]:
        def told(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except (AssertionError, pytest.fail.Exception):  # the second is pytest.raises without an exception
                raise Red from None

        return told

    generated = getattr(theorem, "hypothesis", None)
    inner = generated and generated.inner_test
    if generated:
        generated.inner_test = telling(inner)
    try:
        telling(theorem)()
    except Red:
        return True
    finally:
        if generated:
            generated.inner_test = inner
    return False


@cache
def prove(theorem: Callable[[], None]) -> None:
    """The theorem holds, found once."""
    theorem()


T, L, A, S = test_algorithms, test_loss, test_advantage, test_sample
PADDING = partial(T.test_padding_and_its_garbage_change_no_gradient, "grpo", "token-mean")
SPLIT = partial(T.test_no_split_into_micro_batches_changes_the_gradient, "grpo", "token-mean")
LEFT_OUT = partial(T.test_rows_without_advantage_are_left_out_and_the_gradient_does_not_notice, "grpo", "token-mean")
ROW = S.test_a_row_of_the_batch_is_its_sample_whatever_its_tokens_are
TABLE = L.test_the_weights_of_every_mode_are_the_tables
EQUATION = L.test_every_loss_is_its_equation_in_value_and_gradient
CONTRADICTION = S.test_a_sample_that_contradicts_itself_cannot_be_built

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
    Bug("the weights forget what is left out", sample.Batch.weighted, "weights(aggregation, self.mask.to",
        "weights(aggregation, (self.mask & self.keep).to",
        T.test_the_weights_of_the_others_count_the_rows_that_are_left_out),
    Bug("a dropped token keeps its loss", sample.Batch.weighted, "weight * self.keep", "weight",
        partial(S.test_keep_takes_tokens_away_and_leaves_the_others_weights, "token-mean")),
    # policy.py: what is scored
    Bug("the shift by one is forgotten", Policy.forward, "hidden[:, :-1]", "hidden[:, 1:]",
        S.test_logp_scores_the_token_it_stands_at_given_the_tokens_before_it),
    Bug("log-probs stand one place early", Policy.forward,
        "logp[:, 1:] = logp[:, 1:].masked_scatter(batch.mask[:, 1:], scored)",
        "logp[:, :-1] = logp[:, :-1].masked_scatter(batch.mask[:, 1:], scored)",
        S.test_logp_scores_the_token_it_stands_at_given_the_tokens_before_it),
    Bug("an unnormalised score", Policy.score, "logits.logsumexp(1)", "logits.amax(1)",
        S.test_logp_is_a_distribution_over_the_next_token),
    # advantage.py: better than what
    Bug("the baseline is the batch's mean", advantage.centred, "group_mean(reward, group)", "reward.mean()",
        A.test_the_mean_is_the_groups_not_the_batchs),
    Bug("the std is the batch's", advantage.standardised, "group_std(reward, group, ddof)",
        "reward.std(correction=ddof)",
        A.test_every_estimator_is_its_equation),
    Bug("the std ignores its ddof", advantage.group_std, "group_size(reward, group) - ddof",
        "group_size(reward, group) - 1",
        partial(A.test_std_is_numpys_and_zero_without_freedom, 0)),
    Bug("ε stands under the root", advantage.standardised, "(group_std(reward, group, ddof) + eps)",
        "(group_std(reward, group, ddof).square() + eps).sqrt()",
        partial(A.test_near_constant_rewards_obey_the_equation, 1e-6, 1)),
    Bug("leave-one-out with the row itself in its baseline", advantage.leave_one_out,
        " * size / (size - 1).clamp(min=1)",
        "", partial(A.test_expected_gradient_over_all_groups, "leave_one_out", 3)),
    Bug("leave-one-out without G/(G−1)", advantage.leave_one_out, " * size / (size - 1).clamp(min=1)", "",
        A.test_leave_one_out_is_g_over_g_minus_1_of_centred),
    Bug("rounding of equal rewards becomes an advantage", advantage.centred, ".where(~constant(reward, group), 0.0)",
        "",
        A.test_seven_tenths_are_exactly_no_advantage),
    Bug("a row alone keeps its raw reward", advantage.centred, ".where(~constant(reward, group), 0.0)",
        ".where(group_size(reward, group) > 1, reward)", A.test_a_row_alone_in_its_group_has_no_advantage),
    Bug("prompt and padding get credit", advantage.broadcast, ".where(mask, 0.0)", ".expand(mask.shape)",
        A.test_every_sampled_token_has_its_rows_credit_and_no_other_token_any),
    # loss.py: which way
    Bug("the KL's log ratio is upside down: value", loss.kl, "log_ratio(logp, logp_ref, mask)",
        "log_ratio(logp_ref, logp, mask)",
        partial(L.test_k1_and_k3_are_unbiased_for_the_kl_and_k2_is_not, *L.PAIRS[0])),
    Bug("the KL's log ratio is upside down: gradient", loss.kl, "log_ratio(logp, logp_ref, mask)",
        "log_ratio(logp_ref, logp, mask)", partial(L.test_what_the_gradient_of_each_kl_descends, *L.PAIRS[0])),
    Bug("k3 for k2", loss.kl, "d.square() / 2", "(-d).expm1() + d",
        partial(L.test_what_the_gradient_of_each_kl_descends, *L.PAIRS[0])),
    Bug("exp(−d) − 1 loses its digits", loss.kl, "(-d).expm1() + d", "(-d).exp() - 1 + d",
        L.test_k3_keeps_its_digits_where_the_policies_nearly_agree),
    Bug("max for min", loss.clipped, ".minimum(", ".maximum(",
        L.test_the_clip_flattens_what_goes_too_far_and_nothing_else),
    Bug("a clip without the min", loss.clipped, "(ratio * adv).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * adv)",
        "ratio.clamp(1 - eps_low, 1 + eps_high) * adv", L.test_the_clip_flattens_what_goes_too_far_and_nothing_else),
    Bug("the sides of the clip are swapped", loss.clipped, "ratio.clamp(1 - eps_low, 1 + eps_high)",
        "ratio.clamp(1 - eps_high, 1 + eps_low)", L.test_the_clip_flattens_what_goes_too_far_and_nothing_else),
    Bug("the loss is maximised", loss.clipped, "(-surrogate)", "surrogate", EQUATION),
    Bug("REINFORCE climbs down", loss.reinforce, "-adv.where(mask, 0.0)", "adv.where(mask, 0.0)",
        partial(T.test_rloo_is_the_exact_gradient_of_expected_reward, 2)),
    Bug("NaN times a mask", loss.log_ratio, "(logp.where(mask, 0.0) - logp_old.where(mask, 0.0))",
        "((logp - logp_old) * mask)",
        partial(L.test_nothing_off_the_mask_reaches_value_or_gradient, "k3", L.NAN)),
    Bug("NaN times a mask, in the whole update", loss.log_ratio, "(logp.where(mask, 0.0) - logp_old.where(mask, 0.0))",
        "((logp - logp_old) * mask)", PADDING),
    Bug("an advantage off the mask is used", loss.reinforce, "-adv.where(mask, 0.0)", "-adv",
        partial(L.test_nothing_off_the_mask_reaches_value_or_gradient, "reinforce", L.NAN)),
    Bug("the ratio is bounded after the exp", loss.log_ratio, ".clamp(-bound, bound)", "",
        partial(L.test_log_ratios_of_100_are_finite_in_value_and_gradient, "k3", L.torch.float32)),
    Bug("the mean over tokens is over the rectangle", loss.weights, "return m / m.sum().clamp(min=1)",
        "return m / m.numel()",
        L.test_masked_columns_change_nothing),
    Bug("the mean over an answer is over the width", loss.weights, "m / (rows * tokens.clamp(min=1))[:, None]",
        "m / (rows * m.shape[1])", L.test_masked_columns_change_nothing),
    Bug("Dr.GRPO divides by the width of the batch", loss.weights, "m / (rows * length_limit)",
        "m / (rows * m.shape[1])",
        L.test_masked_columns_change_nothing),
    Bug("a fully masked row counts as an answer", loss.weights, "(tokens > 0).sum().clamp(min=1)", "len(m)",
        L.test_fully_masked_rows_count_nowhere),
    Bug("a fully masked prompt counts as a prompt", loss.weights, "(per_prompt > 0).sum().clamp(min=1)", "len(ids)",
        L.test_fully_masked_rows_count_nowhere),
    Bug("the token-mean is a mean of means", loss.weights, "return m / m.sum().clamp(min=1)",
        "return m / (rows * tokens.clamp(min=1))[:, None]", L.test_the_mean_of_means_is_not_the_mean),
    Bug("a prompt's mean is over its answers", loss.weights, "per_prompt.clamp(min=1)[place]", "tokens.clamp(min=1)",
        TABLE),
    # algorithms.py: which combination
    Bug("π_prox is not held fixed", algorithms.clipped, "logp.detach()", "logp",
        partial(T.test_without_logp_prox_the_policy_itself_is_it, "grpo")),
    Bug("the behaviour's log-probs stand for π_prox's", algorithms.clipped, "else micro.logp_prox",
        "else micro.logp_behave",
        partial(T.test_every_row_is_its_equation_in_loss_and_gradient, "grpo", "token-mean", 0.0, "k3")),
    Bug("the estimator's flag is not passed on", algorithms.with_kl, ", axes.kl_estimator", "",
        partial(T.test_no_option_is_dead, "kl_estimator")),
    Bug("the upper clip is not passed on", algorithms.clipped, ", axes.eps_low, axes.eps_high", ", axes.eps_low, axes.eps_low",
        partial(T.test_no_option_is_dead, "eps_high")),
    Bug("the ddof is not passed on", algorithms.standardised, ", axes.std_ddof, axes.std_eps", ", eps=axes.std_eps",
        partial(T.test_no_option_is_dead, "std_ddof")),
    Bug("no reference is a reference of zeros", algorithms.with_kl,
        "if not axes.kl_weight:\n        return per_token\n",
        "if micro.logp_ref is None:\n        return per_token + 0.1 * logp\n",
        partial(T.test_without_a_reference_there_is_no_kl_term, "grpo")),
    Bug("rows without advantage lose their KL", algorithms.Algorithm.keep, "batch.mask if axes.kl_weight else ", "",
        partial(T.test_with_a_kl_term_rows_without_advantage_stay_and_matter, "grpo", "k3")),
    Bug("rows without advantage cost a pass", algorithms.Algorithm.keep, "batch.mask & batch.adv.ne(0)", "batch.mask",
        LEFT_OUT),
    Bug("only better answers are learnt from", algorithms.Algorithm.keep, "batch.adv.ne(0)", "batch.adv.gt(0)",
        LEFT_OUT),
    Bug("a second epoch is taken for on-policy", algorithms.Algorithm.needs,
        "cfg.updates_per_batch * cfg.epochs_per_batch",
        "cfg.updates_per_batch", T.test_needs_are_what_the_updates_and_the_kl_term_read),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_turns_its_theorem_red_and_its_absence_green(bug):
    with planted(bug):
        assert is_red(bug.theorem)
    prove(bug.theorem)

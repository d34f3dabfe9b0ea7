"""Who tests the tests of asynchrony? Bugs in what runs ahead, planted one at a time as in test_mutants.py.

The first list has those by which others lost the bound on the lag, deadlocked or trained on what they should not have;
it is quick. The rest, by file, is for the slow tests.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest

from nanorl import buffer, cluster, forecast, local, loss, metrics, objective, pace, simulate, timeline
from nanorl.pace import Pace
from tests import test_buffer, test_delayed, test_forecast, test_off_policy, test_pace, test_simulate, test_timeline
from tests.test_mutants import Bug, in_folder, is_red, planted, prove

U, W, X, Y, V, F = test_buffer, test_pace, test_off_policy, test_timeline, test_simulate, test_forecast
THEOREM = U.test_under_any_interleaving_lag_is_bounded_nothing_is_lost_and_nothing_stops
ORACLE = V.test_events_are_what_a_loop_over_single_tokens_finds
ANY = V.test_no_cluster_loses_a_token_is_busier_than_always_or_breaks_the_bound
VERSION = test_delayed.test_every_token_is_sampled_by_the_weights_whose_version_it_carries
HAND = V.test_an_interruption_by_hand


def patched(theorem, *args):
    """The theorem with a monkeypatch of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        theorem(*args, monkeypatch=monkeypatch)


FOLDER = Path(tempfile.mkdtemp())
TRACKS = partial(Y.test_the_file_is_chrome_s_and_no_track_has_two_spans_at_once, folder=FOLDER)
WRITTEN = partial(Y.test_what_is_written_is_read_to_the_microsecond, folder=FOLDER)
KILLED = partial(Y.test_a_killed_run_leaves_all_but_what_it_was_writing, folder=FOLDER)
ONE_TRACK = partial(in_folder, Y.test_spans_that_do_not_overlap_share_a_track)


SLOWEST = V.test_without_interruption_the_slowest_engine_decides_what_may_start_by_hand
MADE = {name: partial(in_folder, F.test_what_is_measured_is_what_made_the_folder, *run)
        for name, run in zip(("alone", "evaluated", "asynchronous", "in turn"), F.RUNS)}  # fmt: skip
RESUMED = partial(in_folder, F.test_of_a_run_that_was_resumed_the_last_start_counts)
PREDICTED = partial(in_folder, F.test_a_run_of_equal_answers_is_predicted_exactly, "worker", (7,))


BOUND = [
    Bug("pacing by the trainer's version while an engine lags", buffer.Buffer.admit, "+ self.acknowledged + 1",
        "+ self.version + 1", THEOREM),
    Bug("a group counts as gone before its update is over", buffer.Buffer.admit, "* self.P - self.placed <= 0",
        "* self.P - (self.placed - len(self.taken)) <= 0", THEOREM),
    Bug("the window is over groups not taken", buffer.Buffer.takeable,
        "window = self.line[oldest : oldest + self.pace.overtake * self.P + 1]",
        "window = [number for number in self.line if number not in self.taken][: self.pace.overtake * self.P + 1]",
        THEOREM),
    Bug("groups are taken as they finish", buffer.Buffer.takeable, "number for number in window if number in self.done",
        "number for number in self.done", THEOREM),
    Bug("the oldest that has finished is taken", buffer.Buffer.takeable,
        "window = self.line[oldest : oldest + self.pace.overtake * self.P + 1]", "window = self.line", THEOREM),
    Bug("a rejected group keeps its place", buffer.Buffer.reject, "self.placed -= 1", "pass", THEOREM),
    Bug("groups left out of their step do not count as trained", buffer.Buffer.trained, 'self.ended["left out"] += ',
        'self.placed -= self.left; self.ended["left out"] += ',
        partial(U.test_groups_left_out_of_their_step_count_as_trained, 2)),
    Bug("an engine that answers late sets the clock back", buffer.Buffer.acknowledge, "max(self.acknowledged, version)",
        "min(self.acknowledged, version)", THEOREM),
    Bug("a resumed run begins to count at 0", buffer.Buffer.__init__, "self.placed = version * prompts_per_step",
        "self.placed = 0", U.test_a_resumed_run_may_start_as_many_as_one_that_never_stopped),
    Bug("a resumed run forgets what was owed", buffer.Buffer.__init__, 'deque(state["again"])', "deque()", THEOREM),
    Bug("delayed weights leave room for overtaking", pace.wrong, '(math.inf if pace.max_lag == "inf" else pace.max_lag)',
        "pace.bound", W.test_whatever_is_not_refused_never_stands_still_nor_samples_without_end),
    Bug("no weight at all (AReaL without its block)", objective.Algorithm.loss, "if axes.correction.on:", "if False:",
        partial(X.test_weighed_by_the_answers_own_ratio_other_samples_have_the_exact_gradient, *X.PAIRS[0])),
    Bug("versions one late", objective.proximal, "micro.step - micro.version", "micro.step - 1 - micro.version",
        X.test_a_tokens_lag_is_its_own_and_a_samples_that_of_its_first_token),
]  # fmt: skip

REST = [
    # buffer.py and pace.py: which samples may be trained on, and how far sampling may run ahead
    Bug("a step more may start than the lag allows", buffer.Buffer.admit, "self.acknowledged + 1) * self.P",
        "self.acknowledged + 2) * self.P", THEOREM),
    Bug("one group more may start than the lag allows", buffer.Buffer.admit, "- self.placed <= 0", "- self.placed < 0",
        THEOREM),
    Bug("overtaking is no part of the lag", buffer.Buffer.admit, "self.pace.bound - self.pace.overtake",
        "self.pace.bound", THEOREM),
    Bug("new prompts come before those owed", buffer.Buffer.admit, "self.again.popleft() if self.again else self.next",
        "self.next", THEOREM),
    Bug("prompts owed are numbers to go on from", buffer.Buffer.admit, "self.next = max(self.next, number + 1)",
        "self.next = number + 1", THEOREM),
    Bug("nothing limits what is in flight", buffer.Buffer.admit, "outstanding >= self.limit or", "",
        U.test_exactly_so_many_prompts_may_start_as_the_lag_allows_fresh_or_resumed),
    Bug("groups of the running update are not in flight", buffer.Buffer.admit, "outstanding >= self.limit",
        "outstanding - len(self.taken) >= self.limit",
        U.test_exactly_so_many_prompts_may_start_as_the_lag_allows_fresh_or_resumed),
    Bug("groups start that no step would train on", buffer.Buffer.admit, "self.placed >= self.steps * self.P or ", "",
        U.test_a_run_starts_no_group_that_none_of_its_steps_would_train_on),
    Bug("groups start after sampling is over", buffer.Buffer.admit, " or self.error is not None", "",
        U.test_refilling_gives_up_when_nothing_has_contrast_for_many_steps_in_a_row),
    Bug("delayed weights without a bound sample without one", buffer.Buffer.limit.fget,
        'if self.pace.delay == "inf" else', "if False else",
        W.test_whatever_is_not_refused_never_stands_still_nor_samples_without_end),
    Bug("the window is over groups not trained on", buffer.Buffer.takeable, "window = self.line[oldest : oldest",
        "window = [n for n in self.line if n not in self.taken or n in [g.prompt.number for g in self.hand]][0 : 0",
        THEOREM),
    Bug("the window is a place too wide", buffer.Buffer.takeable, "self.P + 1]", "self.P + 2]", THEOREM),
    Bug("the window is a place too narrow", buffer.Buffer.takeable, "self.P + 1]", "self.P + (self.pace.overtake == 0)]",
        THEOREM),
    Bug("a rejected group keeps its rank", buffer.Buffer.reject, "self.line.remove(number)", "pass", THEOREM),
    Bug("failed groups are not counted", buffer.Buffer.reject, "self.ended[why] += 1",
        'self.ended[why] += why == "filtered"', THEOREM),
    Bug("groups without contrast are trained on where steps are refilled", buffer.Buffer.put, " and not contrast(group)",
        " and False", THEOREM),
    Bug("groups without contrast are thrown away where steps are not refilled", buffer.Buffer.put,
        'self.pace.dynamic_sampling == "refill" and', 'self.pace.dynamic_sampling != "shrink" and', THEOREM),
    Bug("a step without any contrast is empty", buffer.Buffer.poll, "return kept or groups", "return kept", THEOREM),
    Bug("groups stand in their step as they were taken", buffer.Buffer.poll, "lambda group: rank[group.prompt.number]",
        "lambda group: 0", THEOREM),
    Bug("groups stand in their step by number, those owed first or not", buffer.Buffer.poll, "rank[group.prompt.number]",
        "-group.prompt.number", THEOREM),
    Bug("half a step is taken", buffer.Buffer.poll, "if len(self.hand) < self.P:", "if not self.hand:", THEOREM),
    Bug("only the first token of a sample has to be fresh enough", buffer.Buffer.poll,
        "(min(lags, default=0), max(lags, default=0))", "(max(lags, default=0),)",
        partial(U.test_the_trainer_would_not_train_on_what_the_theorem_excludes, (3, 6), -1, "off")),
    Bug("whatever was sampled is trained on", buffer.Buffer.poll, "not 0 <= lag <= self.pace.bound", "lag < 0",
        partial(U.test_the_trainer_would_not_train_on_what_the_theorem_excludes, (3, 4), 2, "off")),
    Bug("a step's groups leave the order by what is taken, the next step's too", buffer.Buffer.trained,
        "self.version = version",
        "self.version = version; self.line = [n for n in self.line if n not in self.taken]; self.taken.clear()",
        THEOREM),
    Bug("a resumed run forgets what was filtered", buffer.Buffer.__init__, 'Counter(state["ended"])', "Counter()",
        THEOREM),
    Bug("a run that is resumed twice forgets what was owed the first time", buffer.Buffer.state,
        "owed + list(self.again)", "owed", THEOREM),
    Bug("a checkpoint forgets groups taken for a step that has not begun", buffer.Buffer.state, "self.hand + ", "",
        THEOREM),
    Bug("a checkpoint forgets the groups of a step that is not over", buffer.Buffer.state, " + self.running", "",
        THEOREM),
    Bug("a checkpoint owes what it has trained on out of turn", buffer.Buffer.state,
        "for number in self.line if number not in self.taken or number in mine", "for number in self.line", THEOREM),
    Bug("what finished is lost by a checkpoint", buffer.Buffer.state, "if number not in self.taken or",
        "if number not in self.done and number not in self.taken or", THEOREM),
    Bug("groups of the running update are in the making", buffer.Buffer.lap,
        "len(self.line) - len(self.taken) - len(self.done)",
        "self.placed - self.version * self.P - len(self.done) - len(self.hand)", THEOREM),
    Bug("the reward of all is that of those kept", buffer.Buffer.put,
        "self.rewards += [sample.reward for sample in group.samples]",
        "self.rewards += [s.reward for s in group.samples if contrast(group)]",
        U.test_what_waits_what_is_made_and_what_became_of_the_rest_is_counted),
    Bug("one group with contrast does not end a barren row", buffer.Buffer.put, "self.barren = 0", "pass",
        U.test_refilling_gives_up_when_nothing_has_contrast_for_many_steps_in_a_row),
    Bug("the last failure is told", buffer.Buffer.fail, "self.first = self.first or error", "self.first = error",
        partial(U.test_the_first_failure_is_raised_when_more_than_the_share_have_failed, 0.5)),
    Bug("failures are counted for ever", buffer.Buffer.fail, "sum(self.recent) > self", 'self.ended["failed"] > self',
        partial(U.test_the_first_failure_is_raised_when_more_than_the_share_have_failed, 0.5)),
    Bug("a wait in which groups are filtered is one without news", buffer.Buffer.take, " + self.ended.total()", "",
        partial(patched, U.test_the_time_is_that_without_news_not_that_of_the_whole_wait, "filter")),
    Bug("the time is that of the whole wait", buffer.Buffer.take, "if total == ended else", "if True else",
        partial(patched, U.test_the_time_is_that_without_news_not_that_of_the_whole_wait, "put")),
    Bug("fewer may be in flight than a step needs", pace.wrong, "pace.in_flight >= prompts_per_step",
        "pace.in_flight > 0", W.test_whatever_is_not_refused_never_stands_still_nor_samples_without_end),
    # loss.py, objective.py, metrics.py: samples of an older policy
    Bug("the joint weight is by token", loss.ratio, "total.clamp(-BOUND, BOUND).exp().where(mask, 1.0)", "log_r.exp()",
        partial(X.test_weighed_by_the_answers_own_ratio_other_samples_have_the_exact_gradient, *X.PAIRS[0])),
    Bug("the joint weight is the geometric mean", loss.ratio, "return total.clamp",
        "return (total / mask.sum(1, keepdim=True)).clamp",
        partial(X.test_the_weight_of_an_answer_scatters_exponentially_with_its_length_and_that_of_a_token_not, 0.5)),
    Bug("the ratio the wrong way round", loss.correction, "ratio(logp_prox, logp_behave, mask, level)",
        "ratio(logp_behave, logp_prox, mask, level)", X.test_the_example_of_the_page),
    Bug("the weight squared", loss.correction, "mask, level).detach()", "mask, level).detach().square()",
        partial(X.test_weighed_by_token_each_token_is_right_and_its_past_and_future_are_the_samplers, *X.PAIRS[0])),
    Bug("truncation masks", loss.correction, "rho.clamp(low, high)", "rho * (rho <= high)",
        partial(X.test_what_a_bound_leaves_is_another_objective_and_what_it_takes_is_the_mass_beyond_it, "truncate")),
    Bug("masking truncates", loss.correction, "rho * ((rho >= low) & (rho <= high))", "rho.clamp(low, high)",
        X.test_the_example_of_the_page),
    Bug("a mask without its weight", loss.correction, "rho * ((rho >= low) & (rho <= high))",
        "1.0 * ((rho >= low) & (rho <= high))",
        partial(X.test_a_clip_around_the_sampler_is_a_mask_with_one_bound_chosen_by_the_advantages_sign, 1, 0.0)),
    Bug("a floor that nobody asked for", loss.correction, "rho.clamp(low, high)", "rho.clamp(0.5, high)",
        partial(X.test_with_one_update_it_is_the_policy_gradient_with_truncated_weights, "grpo")),
    Bug("the first update's ratio is to the sampler", objective.proximal, "return logp.detach()",
        "return micro.logp_behave",
        partial(X.test_with_one_update_it_is_the_policy_gradient_with_truncated_weights, "grpo")),
    Bug("the weight is that of the moving policy", objective.Algorithm.loss, "L.correction(prox,", "L.correction(logp,",
        partial(X.test_unbounded_and_unclipped_the_split_of_the_ratio_changes_nothing, "recompute", 0.5)),
    Bug("the weight is the surrogate's ratio again", objective.Algorithm.loss, "L.correction(prox, micro.logp_behave,",
        "L.correction(logp, prox,",
        partial(X.test_unbounded_and_unclipped_the_split_of_the_ratio_changes_nothing, "recompute", 0.5)),
    Bug("the old policy of later updates is the current one", objective.proximal, "micro.done == 0", "True",
        X.test_each_half_has_its_own_job),
    Bug("the naive way is the default's", objective.proximal, 'if axes.prox == "behave":', "if False:",
        partial(X.test_the_naive_gradient_lacks_exactly_the_tokens_that_have_moved_the_right_way, *X.PAIRS[0])),
    Bug("the clip looks at one side", loss.clipped, "ratio.clamp(1 - eps_low, 1 + eps_high)",
        "ratio.clamp(max=1 + eps_high)",
        partial(X.test_a_clip_around_the_sampler_is_a_mask_with_one_bound_chosen_by_the_advantages_sign, 1, 0.0)),
    Bug("m2po is clipped", objective.importance, "return L.importance(ratio, adv, mask)",
        "return L.clipped(ratio, adv, mask, 0.2, 0.2)",
        X.test_m2po_is_the_unbounded_weight_without_the_tokens_that_it_drops),
    Bug("m2po keeps all", objective.Algorithm.keep, "if axes.m2_threshold is not None:", "if False:",
        X.test_m2po_is_the_unbounded_weight_without_the_tokens_that_it_drops),
    Bug("auto is nothing", objective.Algorithm.settled, '"truncate" if stale and not own else "none"', '"none"',
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace(delay=3))),
    Bug("auto masks", objective.Algorithm.settled, '"truncate" if', '"mask" if',
        partial(X.test_grpo_of_stale_samples_is_decoupled_ppo_with_truncation, 1, 0.0)),
    Bug("auto corrects fresh samples", objective.Algorithm.settled, "stale and not own", "not own",
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace())),
    Bug("auto corrects SAPO", objective.Algorithm.settled, "self.surrogate is sapo or ", "",
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace(delay=3))),
    Bug("auto corrects M2PO", objective.Algorithm.settled,
        'axes.prox == "behave" or axes.m2_threshold is not None', "False",
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace(delay=3))),
    Bug("auto overrules what was asked for", objective.Algorithm.settled, 'kind == "auto"', 'kind != "mask"',
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace(delay=3))),
    Bug("a delay is not stale", pace.Pace.bound.fget, "max(self.max_lag, self.delay)", "self.max_lag",
        partial(X.test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it, Pace(delay=3))),
    Bug("the lag of the last token", metrics.step_metrics, "mask.int().argmax(1, keepdim=True)",
        "mask.int().cumsum(1).argmax(1, keepdim=True)",
        X.test_a_tokens_lag_is_its_own_and_a_samples_that_of_its_first_token),
    Bug("α the wrong way round", loss.loglinear, "lag / (lag + done)", "done / (lag + done)",
        X.test_a_tokens_lag_is_its_own_and_a_samples_that_of_its_first_token),
    Bug("the correction shown is another", metrics.step_metrics, "L.correction(start, batch.logp_behave,",
        "L.correction(batch.logp_behave, start,", X.test_what_a_stale_step_shows_is_what_its_update_used),
    # local.py: new weights within an answer
    Bug("the cache is kept", local.LocalEngine.update_weights, "self.rows, self.cache, self.length = [], None, None",
        "self.waiting, self.rows = self.waiting[len(self.rows) :], self.rows", VERSION),
    Bug("interrupted answers begin again", local.LocalEngine.update_weights,
        "        self.waiting = self.rows + self.waiting\n",
        "        for r in self.rows:\n            r.new, r.logp, r.version = [], [], []\n"
        "        self.waiting = self.rows + self.waiting\n", VERSION),
    Bug("the version of the first token for all", local.LocalEngine.sample, "request.version.append(self.version)",
        "request.version.append((request.version or [self.version])[0])", VERSION),
    Bug("the last version for all", local.LocalEngine.leave, "tuple(r.version)", "(self.version,) * len(r.new)", VERSION),
    Bug("numbers begin again after an interruption", local.LocalEngine.sample, "r.uniform[len(r.new)]",
        "r.uniform[r.version.count(self.version)]", VERSION),
    # simulate.py, cluster.py, forecast.py: the same on a virtual clock
    Bug("a row joins in the middle of a token step", simulate.Simulation.plan, "math.ceil(", "math.floor(", ORACLE),
    Bug("new weights wait for no boundary", simulate.Simulation.plan, "change and not self.drains(engine)",
        "engine.joining and not self.drains(engine)", ORACLE),
    Bug("an old plan is followed", simulate.Simulation.boundary, "if plan != engine.plan:", "if plan < 0:", ANY),
    Bug("rows that joined late are read as if from the start", simulate.Simulation.boundary,
        "engine.joined -= end - length", "engine.joined -= end", ORACLE),
    Bug("weights enter in spite of rows", simulate.Simulation.drains, " and not self.c.interrupt", " and False", ORACLE),
    Bug("the cache survives new weights", simulate.Simulation.load, "engine.time += self.c.prefill_token * tokens",
        "pass", HAND),
    Bug("the prompt is not read again", simulate.Simulation.load, "(self.c.prompt + engine.count)", "engine.count",
        HAND),
    Bug("reading again counts tokens twice", simulate.Simulation.load, "engine.recomputed += tokens",
        "engine.recomputed += tokens; engine.generated += tokens", ANY),
    Bug("colocated devices load weights that they have", simulate.Simulation.load,
        "0.0 if self.c.colocated else self.c.load", "self.c.load",
        V.test_colocated_all_devices_generate_and_then_all_train),
    Bug("each answer reads its prompt", simulate.Simulation.join, "len({group.number for group, _ in engine.joining})",
        "len(engine.joining)", V.test_alternating_a_step_takes_the_sum_of_its_phases),
    Bug("filtered groups waste nothing", simulate.Simulation.end, "self.wasted += self.making.pop(group.number).tokens",
        "self.making.pop(group.number)", ANY),
    Bug("left-out groups waste nothing", simulate.Simulation.train, "self.wasted += sum(taken.values())",
        "sum(taken.values())", ANY),
    Bug("left-out groups are trained", simulate.Simulation.train, "taken.pop(group.prompt.number) for group in groups",
        "taken[group.prompt.number] for group in groups", ANY),
    Bug("one trainer does all the work", simulate.Simulation.train, " / self.trainers", "",
        V.test_alternating_a_step_takes_the_sum_of_its_phases),
    Bug("two updates at once", simulate.Simulation.train, "self.training or ", "", ANY),
    Bug("the update ends at once", simulate.Simulation.train, "self.at(end, self.updated",
        "self.at(self.now, self.updated", V.test_alternating_a_step_takes_the_sum_of_its_phases),
    Bug("lag is counted from the new version", simulate.Simulation.updated, "version - 1 - s.first_version",
        "version - s.first_version", HAND),
    Bug("the trainer has no overhead", simulate.Simulation.updated, "self.at(free, self.free)",
        "self.at(self.now, self.free)",
        V.test_asynchronous_a_step_takes_the_longer_phase_or_its_share_of_the_way_around),
    Bug("weights arrive at once", simulate.Simulation.updated, "else self.now + self.c.sync", "else self.now",
        V.test_alternating_a_step_takes_the_sum_of_its_phases),
    Bug("the engine with the most rows gets the next", simulate.Simulation.admit, "(least + 1, i)", "(least, i)",
        V.test_colocated_all_devices_generate_and_then_all_train),
    Bug("what runs at the end is lost", simulate.Simulation.run, "unfinished += rows * engine.count - engine.joined",
        "pass", ANY),
    Bug("rates count the start", cluster.Result.half.fget, "n = len(self.steps) // 2", "n = 0",
        V.test_one_step_ahead_a_step_takes_the_longer_phase_or_half_the_way_around),
    Bug("lengths depend on the mode", cluster.Cluster.draw, "(self.seed, number)", "(self.seed, number, self.engines)",
        V.test_a_prompt_has_the_same_answers_in_every_mode),
    Bug("a lognormal of the median", cluster.Cluster.draw, " - self.sigma**2 / 2", "",
        V.test_the_distributions_have_their_mean),
    Bug("fit takes what is negative", forecast.fit, "(w >= 0).all() and ", "",
        F.test_the_fit_is_the_minimum_over_what_is_not_negative),
    Bug("fit stops at one feature", forecast.fit, "range(1, x.shape[1] + 1)", "range(1, 2)",
        F.test_the_fit_is_the_minimum_over_what_is_not_negative),
    Bug("timelines of different length", forecast.excerpt, "min(long, s.end - r.half[0])", "s.end - r.half[0]",
        F.test_the_timelines_of_several_modes_show_as_long_a_time),
    # timeline.py: who did what, and when
    Bug("the end of a joined span is that of its last piece's start", timeline.Lane.add, "end=max(last.end, end)",
        "end=max(last.end, start)", Y.test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps),
    Bug("a span keeps its start when a piece began before it", timeline.Lane.add, "start=min(last.start, start)",
        "start=last.start", Y.test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps),
    Bug("a span grows for ever", timeline.Lane.add, " and last.seconds < self.longest", "",
        Y.test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps),
    Bug("the counts of a joined span are those of its last piece", timeline.Lane.add, "last.args.get(key, 0) + counts",
        "counts", Y.test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps),
    Bug("the gap is not waited for", timeline.Lane.add, "last.end + self.gap", "last.end",
        Y.test_pieces_join_up_to_the_gap_and_while_the_span_is_short),
    Bug("a lap is told twice", timeline.Lane.lap, "self.spans, []", "self.spans, self.spans",
        Y.test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps),
    Bug("overlapping spans on one track", timeline.Trace.write, "if until <= start", "if True", TRACKS),
    Bug("every span has a track of its own", timeline.Trace.write, "if until <= start", "if False", ONE_TRACK),
    Bug("spans are written as they come", timeline.Trace.write, "sorted(spans, key=lambda span: span.start)", "spans",
        ONE_TRACK),
    Bug("the viewer's tracks of all lanes are the same", timeline.Trace.write, "1000 * pid + thread", "1 + thread",
        TRACKS),
    Bug("times of the machine", timeline.Trace.write, "(time - self.origin)", "time", WRITTEN),
    Bug("milliseconds", timeline.Trace.write, "round(1e6 *", "1000 * round(1e3 *", WRITTEN),
    Bug("the file is written at the end", timeline.Trace.write, "self.file.flush()", "pass", KILLED),
    Bug("a killed run's last whole line is lost", timeline.read, '.split("\\n")[:-1]', '.split("\\n")[:-2]', KILLED),
    Bug("the end is not closed", timeline.Trace.close, 'self.file.write("]\\n")', "pass", TRACKS),
    Bug("waiting is work", timeline.busy, ' and s.name != "wait"', "", Y.test_a_lane_is_as_busy_as_moment_by_moment),
    Bug("overlapping work counts twice", timeline.busy, "for start, end in union(s for s",
        "for start, end in ((s.start, s.end) for s", Y.test_a_lane_is_as_busy_as_moment_by_moment),
    Bug("a lane's own time is its time", timeline.busy, "extent(spans)",
        "extent([s for s in spans if s.lane == lane] or spans)", Y.test_a_lane_is_as_busy_as_moment_by_moment),
    Bug("a short span cuts the long one that it lies in", timeline.union, "max(last, end)", "end",
        Y.test_a_union_is_disjoint_and_in_order),
    Bug("intervals that touch stay apart", timeline.union, "start <= merged", "start < merged",
        Y.test_a_union_is_disjoint_and_in_order),
    Bug("a letter for any work at all", timeline.letters, "[wide - seconds for seconds in filled(spans)]",
        "[0.0] * slices", Y.test_a_letter_is_what_took_most_of_its_slice),
    Bug("all of a span is in its first slice", timeline.letters, "min(end, first + (i + 1) * wide)", "end",
        Y.test_a_letter_is_what_took_most_of_its_slice),
    Bug("work of one letter overwrites other work of it", timeline.letters, "if letter[span.name] == own",
        "if span.name == [name for name in letter if letter[name] == own][-1]",
        Y.test_a_letter_is_what_took_most_of_its_slice),
    Bug("the ruler is a letter late", timeline.text, "{first + i * wide:", "{first + (i + 1) * wide:",
        Y.test_the_ruler_tells_the_time_of_the_letter_under_its_mark),
    Bug("the ruler rounds too much", timeline.text, "-math.floor(", "-math.ceil(",
        Y.test_the_ruler_tells_the_time_of_the_letter_under_its_mark),
    Bug("the first lanes are drawn", timeline.drawn, "names[i * (len(names) - 1) // (most - 1)]", "names[i]",
        Y.test_of_many_lanes_some_are_drawn_evenly_in_order_and_a_line_says_so),
    Bug("engine 10 comes before engine 2", timeline.drawn, "(len(lane), lane)", "lane",
        Y.test_of_many_lanes_some_are_drawn_evenly_in_order_and_a_line_says_so),
    Bug("bars end at their length", timeline.gantt, "(start, end - start) for", "(start, end) for",
        Y.test_the_picture_has_a_row_for_each_lane_and_a_bar_for_all_that_it_did),
    Bug("the picture has all work in one row", timeline.gantt, "(row - 0.4, 0.8)", "(-0.4, 0.8)",
        Y.test_the_picture_has_a_row_for_each_lane_and_a_bar_for_all_that_it_did),
    Bug("only one row leaves at a time", simulate.Simulation.boundary,
        "while engine.leaving and engine.leaving[0][0] == engine.count:",
        "if engine.leaving and engine.leaving[0][0] == engine.count:", ORACLE),
    Bug("an engine acknowledges what has not been loaded", simulate.Simulation.load,
        "self.at(engine.time, self.acknowledge", "self.at(start, self.acknowledge", SLOWEST),
    Bug("a sample is as old as its group's admission, not its first token", simulate.Simulation.join,
        "group.versions.append(engine.version)", "group.versions.append(self.buffer.acknowledged)", ORACLE),
    Bug("the fastest engine acknowledges for all", simulate.Simulation.acknowledge, "min(e.acknowledged",
        "max(e.acknowledged", SLOWEST),
    Bug("every interrupted answer is read alone", simulate.Simulation.load, "self.c.distinct * (", "1 * (", ORACLE),
    Bug("gaps are idle", forecast.lasting, "gap if 0 < gap < GAP else 0.0", "0.0", MADE["alone"]),
    Bug("loading is sampling", forecast.lasting, " - within(loads, span.end, later.start)", "", MADE["asynchronous"]),
    Bug("all lengths of the run", forecast.measured, 'if sample["step"] >= rows[half]["step"]', "", MADE["alone"]),
    Bug("evaluation is overhead", forecast.measured, " - within(evaluations, update.end, later.start)", "",
        MADE["evaluated"]),
    Bug("evaluation is part of a step", forecast.measured, ' - row.get("seconds/evaluate", 0)', "", PREDICTED),
    Bug("answers of an evaluation are sampling", forecast.measured,
        "and not any(e.start <= s.start < e.end for e in evaluations)", "", MADE["in turn"]),
    Bug("the way around has the evaluation in it", forecast.around, " - within(evaluations, start, end)", "",
        MADE["evaluated"]),
    Bug("overhead and switch both", forecast.measured, "max(0.0, sync - overhead) * local", "sync * local",
        MADE["in turn"]),
    Bug("a resumed run counts from its first start", forecast.measure, "rows[begun:]", "rows", RESUMED),
    Bug("shared beginnings are read by each", forecast.measured, "read / of if of else 1.0", "1.0", MADE["asynchronous"]),
]  # fmt: skip


def red_and_green(bug):
    """Its theorem fails with the bug, by what it asserts, and holds without it."""
    with planted(bug):
        assert is_red(bug.theorem)
    prove(bug.theorem)


@pytest.mark.parametrize("bug", BOUND, ids=lambda bug: bug.name)
def test_a_bug_by_which_the_bound_was_lost_turns_its_theorem_red(bug):
    red_and_green(bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", REST, ids=lambda bug: bug.name)
def test_a_bug_turns_its_theorem_red_and_its_absence_green(bug):
    red_and_green(bug)

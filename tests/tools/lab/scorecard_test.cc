// Goal: a scorecard says what the judge said and what became of the run, takes
// the labels' word for it, and is the same whatever files are called.
// Method: the recorded runs, copied, renamed and unlabelled; made-up scores.

#include "tools/lab/scorecard.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_directory.h"
#include "tools/lab/run_set.h"
#include "tools/lab/scorecard_text.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

const std::string kRuns = BELLWETHER_TESTDATA "/runs/";

TEST(RateTest, HasThePoissonInterval) {
  const Rate none = MakeRate(0, 1000);
  EXPECT_EQ(none.value, 0);
  EXPECT_EQ(none.lower, 0);
  EXPECT_NEAR(none.upper, 3.689, 0.001);
  const Rate ten = MakeRate(10, 2000);
  EXPECT_EQ(ten.value, 5);
  EXPECT_NEAR(ten.lower, 4.795 / 2, 0.001);
  EXPECT_NEAR(ten.upper, 18.390 / 2, 0.001);
  EXPECT_TRUE(std::isnan(MakeRate(0, 0).value));
}

TEST(ScorecardTest, ScoresAFailingRun) {
  const auto labels = ReadRunLabels(kRuns + "labels.json");
  ASSERT_TRUE(labels.ok());
  const auto score = ScoreRun(kRuns + "gpt-flash-s17.bwrun", &labels->at("gpt-flash-s17"), {});
  ASSERT_TRUE(score.ok()) << score.status();
  EXPECT_EQ(score->run, "gpt-flash-s17");
  EXPECT_EQ(score->failed_at(), 4120);
  EXPECT_LT(score->first_warning, 4120 - 500);
  EXPECT_GT(score->first_critical, score->first_warning);
  EXPECT_EQ(score->named_heads.at(0).layer, 1);
  EXPECT_EQ(score->truth.steps, 11280);
  EXPECT_FALSE(score->quiet());
  EXPECT_EQ(score->false_warnings(), 0) << "a warning of a failure is not false";
}

TEST(ScorecardTest, NameAndLabelChangeNoVerdict) {
  TempDirectory folder;
  std::filesystem::copy(kRuns + "gpt-flash-s17.bwrun", folder.path() + "/healthy-for-sure.bwrun");
  const RunLabel lie{.family = "healthy", .truth = {}};
  const auto told = ScoreRun(folder.path() + "/healthy-for-sure.bwrun", &lie, {});
  const auto untold = ScoreRun(kRuns + "gpt-flash-s17.bwrun", nullptr, {});
  ASSERT_TRUE(told.ok() && untold.ok());
  EXPECT_EQ(told->first_warning, untold->first_warning);
  EXPECT_EQ(told->first_critical, untold->first_critical);
  EXPECT_EQ(told->named_heads, untold->named_heads);
  EXPECT_EQ(told->warnings, untold->warnings);
  EXPECT_EQ(untold->failed_at(), 4120) << "found in the run";
  EXPECT_EQ(told->false_warnings(), told->warnings) << "the label is believed";
}

TEST(ScorecardTest, AFolderIsScoredByNameAndPrintedAsLines) {
  TempDirectory folder;
  for (const char* run : {"gpt-hp-s4", "gpt-flash-s17"}) {
    std::filesystem::copy(kRuns + run + ".bwrun", folder.path() + "/" + run + ".bwrun");
  }
  std::ofstream(folder.path() + "/notes.txt") << "not a run";
  size_t told = 0;
  const auto card = ScoreRuns({.folder = folder.path(), .progress = [&](size_t done, size_t of) {
                                 EXPECT_EQ(done, ++told);
                                 EXPECT_EQ(of, 2u);
                               }});
  ASSERT_TRUE(card.ok()) << card.status();
  EXPECT_EQ(told, 2u);
  EXPECT_TRUE(card->failures.empty());
  std::istringstream lines(ToJsonLines(*card, AddUp(card->scores)));
  std::vector<nlohmann::json> objects;
  for (std::string line; std::getline(lines, line);) objects.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(objects.size(), 3u);
  EXPECT_EQ(objects[0]["run"], "gpt-flash-s17");
  EXPECT_EQ(objects[0]["t_sigma"], 4120);
  EXPECT_EQ(objects[0]["first_bad_head"][0], 1);
  EXPECT_EQ(objects[1]["run"], "gpt-hp-s4");
  EXPECT_TRUE(objects[1]["t_sigma"].is_null());
  EXPECT_TRUE(objects[1]["first_warning"].is_null());
  EXPECT_EQ(objects[1]["false_warnings"], 0);
  EXPECT_TRUE(objects[2]["run"].is_null());
  EXPECT_EQ(objects[2]["rules"][0]["rule"], "bellwether");
  EXPECT_EQ(objects[2]["rules"][0]["warned_in_time"], 1);
  EXPECT_EQ(objects[2]["rules"][0]["quiet"], 1);
  EXPECT_EQ(objects[2]["critical_in_time"], 1);
  EXPECT_EQ(objects[2]["mean_lead"], objects[0]["t_sigma"].get<int64_t>() - objects[0]["first_warning"].get<int64_t>());
  std::set<std::string> keys;
  for (const auto& [key, value] : objects[0].items()) keys.insert(key);
  EXPECT_THAT(keys, ::testing::ElementsAre("eta_error", "false_criticals", "false_warnings", "family", "first_bad_head",
                                           "first_critical", "first_warning", "named_heads", "peers", "run", "steps",
                                           "t_loss", "t_sigma"));
  EXPECT_THAT(ToTable(*card, AddUp(card->scores)), HasSubstr("| bellwether | 1 of 1 |"));
}

TEST(ScorecardTest, RunsOfTheBenchmarkAreNeitherQuietNorFailures) {
  TempDirectory folder;
  std::filesystem::copy(kRuns + "gpt-flash-s17.bwrun", folder.path() + "/stall-train-1.bwrun");
  std::ofstream(folder.path() + "/stall-train-1.json") << "{}";
  const auto card = ScoreRuns({.folder = folder.path()});
  ASSERT_TRUE(card.ok()) << card.status();
  EXPECT_EQ(card->of_benchmark, 1u);
  EXPECT_EQ(card->scores[0].family, "benchmark");
  EXPECT_FALSE(card->scores[0].quiet());
  EXPECT_FALSE(card->scores[0].fails());
  EXPECT_GT(card->scores[0].warnings, 0);
}

// A job's own signal is judged by its name, which only the rows of the run have.
TEST(ScorecardTest, TheJudgeKnowsTheRowsOfARun) {
  const auto walk = [](RunListener* listener) {
    RunDescription run;
    run.layout = {.layers = 2, .heads = 1, .kv_heads = 1, .own = 1};
    listener->OnHello(run);
    RunRows rows;
    rows.own_signals.emplace_back().name = "kl";
    rows.AddOwnCell({.signal = 0});
    listener->OnRows(rows);
    for (int64_t step = 0; step < 40; ++step) {
      StepSample sample;
      sample.Reset(run.layout);
      sample.step = step;
      sample.Add(SignalId::kOwnMean)[0] = step < 20 ? 1 : std::nanf("");
      listener->OnSample(sample);
    }
    return absl::OkStatus();
  };
  const auto score = ScoreWalk("r", walk, nullptr, {}, false);
  ASSERT_TRUE(score.ok());
  EXPECT_TRUE(score->warned_rules.contains("own"));
}

TEST(ScorecardTest, UnreadableRunsAreNamedAndTheRestScored) {
  TempDirectory folder;
  const std::string good = kRuns + "gpt-flash-s17.bwrun";
  std::filesystem::copy(good, folder.path() + "/b-good.bwrun");
  std::filesystem::copy(good, folder.path() + "/c-cut.bwrun");
  std::filesystem::resize_file(folder.path() + "/c-cut.bwrun", std::filesystem::file_size(good) / 2);
  std::ofstream(folder.path() + "/a-empty.bwrun");
  std::ofstream(folder.path() + "/d-words.bwrun") << "not a recording";
  const auto card = ScoreRuns({.folder = folder.path()});
  ASSERT_TRUE(card.ok()) << card.status();
  ASSERT_EQ(card->scores.size(), 1u);
  EXPECT_EQ(card->scores[0].run, "b-good");
  EXPECT_EQ(card->scores[0].failed_at(), 4120);
  EXPECT_THAT(card->failures, ::testing::ElementsAre(HasSubstr("a-empty.bwrun: "), HasSubstr("c-cut.bwrun: "),
                                                     HasSubstr("d-words.bwrun: ")));
  const auto set = RunSet::Read(folder.path(), "", nullptr);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->failures(), card->failures);
  ASSERT_EQ(set->size(), 1u);
  EXPECT_EQ(set->Score(0, {}).first_warning, card->scores[0].first_warning);
}

TEST(ScorecardTest, LabelsOfOtherRunsChangeNoScore) {
  TempDirectory folder;
  for (const char* run : {"gpt-hp-s4", "gpt-flash-s17"}) {
    std::filesystem::copy(kRuns + run + ".bwrun", folder.path() + "/" + run + ".bwrun");
  }
  const auto unlabelled = ScoreRuns({.folder = folder.path()});
  std::ifstream file(kRuns + "labels.json");
  const auto labels = nlohmann::json::parse(file);
  std::ofstream(folder.path() + "/labels.json")
      << nlohmann::json{{"gpt-hp-s4", labels["gpt-flash-s17"]}, {"gpt-flash-s17", labels["gpt-hp-s4"]}};
  const auto swapped = ScoreRuns({.folder = folder.path()});
  ASSERT_TRUE(unlabelled.ok() && swapped.ok());
  for (size_t i = 0; i < 2; ++i) {
    const RunScore &a = unlabelled->scores[i], &b = swapped->scores[i];
    EXPECT_NE(a.failed_at(), b.failed_at()) << "the labels are read";
    EXPECT_EQ(a.first_warning, b.first_warning);
    EXPECT_EQ(a.first_critical, b.first_critical);
    EXPECT_EQ(a.named_heads, b.named_heads);
    EXPECT_EQ(a.warnings, b.warnings);
    EXPECT_EQ(a.criticals, b.criticals);
  }
}

// A run of 3,000 steps of 2 x 8 heads that tells what `fill` puts into each
// step's sample.
RunScore ScoreMadeUp(const std::function<void(StepSample*)>& fill) {
  const auto walk = [&](RunListener* listener) {
    RunDescription run;
    run.layout = {.layers = 2, .heads = 8, .kv_heads = 8};
    listener->OnHello(run);
    StepSample sample;
    for (int64_t step = 0; step <= 3000; ++step) {
      sample.Reset(run.layout);
      sample.step = step;
      fill(&sample);
      listener->OnSample(sample);
    }
    return absl::OkStatus();
  };
  const auto score = ScoreWalk("made up", walk, nullptr, {});
  EXPECT_TRUE(score.ok()) << score.status();
  return *score;
}

TEST(ScorecardTest, RunsThatTellLittleOrNonsenseAreScored) {
  const RunScore nothing = ScoreMadeUp([](StepSample*) {});
  EXPECT_EQ(nothing.first_warning, -1);
  EXPECT_EQ(nothing.truth.steps, 3000);
  const RunScore loss = ScoreMadeUp(
      [](StepSample* sample) { sample->Add(SignalId::kLoss)[0] = 2 + 1e-3f * static_cast<float>(sample->step % 3); });
  EXPECT_EQ(loss.first_warning, -1);
  EXPECT_FALSE(loss.fails());
  // Neither loss nor scores: the weights alone.
  const RunScore weights = ScoreMadeUp([](StepSample* sample) {
    if (sample->step % 10 != 0) return;
    for (float& sigma : sample->Add(SignalId::kWqSigma)) sigma = 3;
    if (sample->step > 1000) {
      sample->Add(SignalId::kWqSigma)[5] = 3 * std::exp2(static_cast<float>(sample->step - 1000) / 300);
    }
  });
  EXPECT_GT(weights.truth.t_sigma, 1000);
  EXPECT_GE(weights.first_warning, 1000);
  EXPECT_EQ(weights.named_heads.at(0), (Head{0, 5}));
  const RunScore nan = ScoreMadeUp([](StepSample* sample) {
    const bool lost = sample->step > 2000;
    sample->Add(SignalId::kLoss)[0] = lost ? std::nanf("") : 2.0f;
    if (lost) sample->Add(SignalId::kWqSigma)[0] = std::nanf("");
  });
  EXPECT_EQ(nan.first_critical, 2001);
  EXPECT_GT(nan.truth.t_loss, 1900);
  // And their lines are JSON.
  const std::vector<RunScore> scores = {nothing, loss, weights, nan};
  std::istringstream lines(ToJsonLines({.scores = scores}, AddUp(scores)));
  int objects = 0;
  for (std::string line; std::getline(lines, line); ++objects) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  EXPECT_EQ(objects, 5);
}

TEST(ScorecardTest, ARunOfAHelloAloneIsScored) {
  const auto walk = [](RunListener* listener) {
    RunDescription run;
    run.layout = {.layers = 1, .heads = 1, .kv_heads = 1};
    listener->OnHello(run);
    return absl::OkStatus();
  };
  const auto score = ScoreWalk("hello", walk, nullptr, {});
  ASSERT_TRUE(score.ok());
  EXPECT_EQ(score->truth.steps, 0);
  EXPECT_THAT(ToTable({.scores = {*score}}, AddUp({*score})), HasSubstr("| hello |"));
}

TEST(ScorecardTest, WarningsAreCountedByTheirEvidence) {
  const auto score = ScoreRun(kRuns + "gpt-flash-s17.bwrun", nullptr, {});
  ASSERT_TRUE(score.ok());
  int64_t sum = 0;
  for (const auto& [cause, count] : score->warned_by) sum += count;
  EXPECT_EQ(sum, score->warnings);
  EXPECT_TRUE(score->warned_by.contains("drift_ratio growth")) << score->warned_by.begin()->first;
}

TEST(ScorecardTest, MissingOrDamagedInputIsNamed) {
  TempDirectory folder;
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path()}).status().message()), HasSubstr("holds no *.bwrun"));
  std::ofstream(folder.path() + "/trace.npz") << "a trace";
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path()}).status().message()),
              ::testing::AllOf(HasSubstr("1 *.npz"), HasSubstr("python -m bellwether npz2run")));
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path() + "/no"}).status().message()), HasSubstr("/no"));
  std::ofstream(folder.path() + "/labels.json") << R"({"a": {"family": "healthy"}})";
  EXPECT_THAT(std::string(ReadRunLabels(folder.path() + "/labels.json").status().message()),
              ::testing::AllOf(HasSubstr("run a"), HasSubstr("t_sigma")));
}

TEST(ScorecardTest, TotalsCountInTimeOnly) {
  RunScore late{.run = "late",
                .truth = {.t_sigma = 1000, .heads = {{2, 3}}, .steps = 2000},
                .first_warning = 1500,
                .named_heads = {{2, 0}, {2, 1}, {2, 3}}};
  RunScore early = late;
  early.first_warning = 400;
  early.eta_error = -0.3;
  RunScore drifting{.run = "drifting",
                    .family = "drifting",
                    .truth = {.steps = 1000},
                    .first_warning = 5,
                    .warnings = 1,
                    .criticals = 1};
  RunScore quiet{.run = "quiet", .truth = {.steps = 1000}, .first_warning = 7, .warnings = 2, .criticals = 1};
  const ScorecardTotals totals = AddUp({late, early, drifting, quiet});
  ASSERT_EQ(totals.rules.size(), 1u);
  EXPECT_EQ(totals.rules[0].failing, 2);
  EXPECT_EQ(totals.rules[0].warned_in_time, 1);
  EXPECT_EQ(totals.rules[0].median_lead, 600);
  EXPECT_EQ(totals.rules[0].quiet, 1);
  EXPECT_EQ(totals.rules[0].quiet_warned, 1);
  EXPECT_EQ(totals.rules[0].false_warnings.count, 2);
  EXPECT_EQ(totals.rules[0].false_warnings.steps, 1000);
  EXPECT_EQ(totals.with_heads, 2);
  EXPECT_EQ(totals.layer_right, 2);
  EXPECT_EQ(totals.first_right, 0);
  EXPECT_EQ(totals.first_three_right, 2);
  EXPECT_EQ(totals.etas_asked, 1);
  EXPECT_EQ(totals.etas_within_35_percent, 1);
  EXPECT_EQ(totals.false_criticals, 2);
}

}  // namespace
}  // namespace bellwether::server

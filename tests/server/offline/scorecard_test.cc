// Goal: a scorecard says what the judge said and what became of the run, takes
// the labels' word for it, and is the same whatever files are called.
// Method: the recorded runs, copied, renamed and unlabelled; made-up scores.

#include "server/offline/scorecard.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/offline/scorecard_text.h"
#include "tests/support/temp_directory.h"

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

TEST(ScorecardTest, NamesAndLabelsChangeNothingOfWhatIsSaid) {
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
  const auto scores = ScoreRuns({.folder = folder.path(), .progress = [&](size_t done, size_t of) {
                                   EXPECT_EQ(done, ++told);
                                   EXPECT_EQ(of, 2u);
                                 }});
  ASSERT_TRUE(scores.ok()) << scores.status();
  EXPECT_EQ(told, 2u);
  std::istringstream lines(ToJsonLines(*scores, AddUp(*scores)));
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
  for (const char* key : {"named_heads", "eta_error", "false_criticals", "first_critical", "t_loss", "steps"}) {
    EXPECT_TRUE(objects[0].contains(key)) << key;
  }
  EXPECT_THAT(ToTable(*scores, AddUp(*scores)), HasSubstr("| bellwether | 1 of 1 |"));
}

TEST(ScorecardTest, WhatIsMissingOrDamagedIsNamed) {
  TempDirectory folder;
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path()}).status().message()), HasSubstr("holds no *.bwrun"));
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path() + "/no"}).status().message()), HasSubstr("/no"));
  std::ofstream(folder.path() + "/cut.bwrun") << "not a recording";
  EXPECT_THAT(std::string(ScoreRuns({.folder = folder.path()}).status().message()), HasSubstr("cut.bwrun"));
  std::ofstream(folder.path() + "/labels.json") << R"({"a": {"family": "healthy"}})";
  EXPECT_THAT(std::string(ReadRunLabels(folder.path() + "/labels.json").status().message()),
              ::testing::AllOf(HasSubstr("run a"), HasSubstr("t_sigma")));
}

TEST(ScorecardTest, TotalsCountInTimeOnly) {
  RunScore late{.run = "late", .truth = {.t_sigma = 1000, .heads = {{2, 3}}, .steps = 2000}, .first_warning = 1500,
                .named_heads = {{2, 0}, {2, 1}, {2, 3}}};
  RunScore early = late;
  early.first_warning = 400;
  early.eta_error = -0.3;
  RunScore drifting{.run = "drifting", .family = "drifting", .truth = {.steps = 1000}, .first_warning = 5, .warnings = 1, .criticals = 1};
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

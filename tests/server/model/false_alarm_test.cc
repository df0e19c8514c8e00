// Goal: two alerts are of one illness if they have the same cause at the same place.
// Method: transitions as rules make them of the run, of heads, experts and tensors.

#include "server/model/false_alarm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

AlertTransition Firing(const std::string& rule, const std::string& cause) {
  AlertTransition transition;
  transition.state = AlertState::kFiring;
  transition.rule = rule;
  transition.cause = cause;
  return transition;
}

TEST(FalseAlarmTest, PlaceOfHeadsIsTheirLayer) {
  AlertTransition drift = Firing("drift", "rounding drift");
  drift.strongest = {3, 5};
  drift.heads = {{3, 5}, {3, 7}, {1, 0}};
  // What follows from it is no place of it.
  drift.evidence = {{.signal = "tensor_grad_norm", .text = "lm_head.weight"}};
  EXPECT_THAT(IllnessOf(drift).places, ElementsAre("layer 1", "layer 3"));
}

TEST(FalseAlarmTest, PlacesAreExpertsTensorsOrTheRun) {
  AlertTransition dead = Firing("experts", "dead experts");
  dead.strongest.layer = 2;
  dead.evidence = {{.signal = "expert_load", .where = {2, 4}}, {.signal = "expert_load", .where = {2, 9}}};
  EXPECT_THAT(IllnessOf(dead).places, ElementsAre("layer 2 expert 4", "layer 2 expert 9"));
  AlertTransition frozen = Firing("frozen", "optimizer does not move");
  frozen.evidence = {{.signal = "tensor_moved", .text = "lm_head.weight, a.bias, ..."}, {.signal = "tensor_moved"}};
  EXPECT_THAT(IllnessOf(frozen).places, ElementsAre("a.bias", "lm_head.weight"));
  AlertTransition own = Firing("kl is high", "unknown");
  for (const char* const detail : {"sum 9.0, which fires above 8", "7.0 standard deviations off"}) {
    own.evidence = {{.signal = "kl", .text = absl::StrCat("kl: ", detail)}};
    EXPECT_THAT(IllnessOf(own).places, ElementsAre("kl")) << detail;
  }
  for (const char* const detail :
       {"sum 9.0, which fires above 8", "doubles every 50 steps: z 5.0, r2 0.90", "7.0 standard deviations off"}) {
    own.evidence[0].text = detail;
    EXPECT_THAT(IllnessOf(own).places, IsEmpty()) << "of the run, and no name: " << detail;
  }
  AlertTransition loss = Firing("loss", "learning rate too high");
  loss.evidence = {{.signal = "loss"}, {.signal = "tensor_grad_norm", .text = "lm_head.weight"}};
  EXPECT_THAT(IllnessOf(loss).places, IsEmpty());
  AlertTransition layer = Firing("disagreement", "replicas apart");
  layer.strongest.layer = 6;
  EXPECT_THAT(IllnessOf(layer).places, ElementsAre("layer 6"));
}

TEST(FalseAlarmTest, JudgmentCoversSameCauseAtNoOtherPlace) {
  AlertTransition two = Firing("drift", "rounding drift");
  two.heads = {{1, 0}, {3, 5}};
  AlertTransition one = two;
  one.heads = {{3, 2}};
  EXPECT_TRUE(Covers(IllnessOf(two), IllnessOf(one)));
  EXPECT_FALSE(Covers(IllnessOf(one), IllnessOf(two))) << "layer 1 was not judged";
  AlertTransition ties = one;
  ties.rule = "ties";
  EXPECT_TRUE(Covers(IllnessOf(two), IllnessOf(ties))) << "the cause is known, whatever shows it";
  ties.cause = "logit growth";
  EXPECT_FALSE(Covers(IllnessOf(two), IllnessOf(ties)));
  EXPECT_FALSE(Covers(IllnessOf(Firing("loss", "")), IllnessOf(Firing("gradient", "")))) << "nobody knows the cause";
  EXPECT_TRUE(Covers(IllnessOf(Firing("loss", "")), IllnessOf(Firing("loss", "unknown"))));
  AlertTransition whole = two;
  whole.heads.clear();
  EXPECT_FALSE(Covers(IllnessOf(two), IllnessOf(whole))) << "the run is no part of a layer";
}

TEST(FalseAlarmTest, LastWordOnAnIllnessCounts) {
  AlertTransition two = Firing("drift", "rounding drift");
  two.heads = {{1, 0}, {3, 5}};
  AlertTransition one = two;
  one.heads = {{3, 2}};
  const auto word = [](const AlertTransition& of, Severity severity, bool undone) {
    FalseAlarm said;
    said.illness = IllnessOf(of);
    said.severity = severity;
    said.undone = undone;
    return said;
  };
  std::vector<FalseAlarm> said = {word(two, Severity::kWarning, false)};
  EXPECT_TRUE(Mutes(LastSaid(said, IllnessOf(one)), Severity::kWarning));
  EXPECT_FALSE(Mutes(LastSaid(said, IllnessOf(one)), Severity::kCritical)) << "it is worse";
  EXPECT_FALSE(Mutes(LastSaid(said, IllnessOf(Firing("loss", ""))), Severity::kInfo)) << "nothing was said of it";
  said.push_back(word(one, Severity::kWarning, true));
  EXPECT_FALSE(Mutes(LastSaid(said, IllnessOf(one)), Severity::kWarning));
  EXPECT_TRUE(Mutes(LastSaid(said, IllnessOf(two)), Severity::kWarning));
}

}  // namespace
}  // namespace bellwether::server

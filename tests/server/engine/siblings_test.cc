// Goal: what was learned from healthy runs is in the alerts of those that come
// after, is kept, and changes nothing else of them.
// Method: recorded runs through the whole engine.
#include "server/engine/siblings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/ingest/decode.h"
#include "server/query/convert.h"
#include "tests/support/service_stack.h"
#include "tests/support/transition_text.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

const char* const kHealthy[] = {"gpt-flash-lr3e4-s5", "gpt-flash-lr1e3-s15", "gpt-flash-glitch-s6"};

std::string File(const std::string& run) { return "runs/" + run + ".bwrun"; }

// The first transition of the rule.
const AlertTransition* FirstOf(const std::vector<AlertTransition>& transitions, const std::string& rule) {
  for (const AlertTransition& transition : transitions) {
    if (transition.rule == rule) return &transition;
  }
  return nullptr;
}

TEST(SiblingsTest, AFailingRunIsHeldAgainstEarlierHealthyOnes) {
  ServiceStack service;
  // The first of its kind has no siblings.
  const std::vector<AlertTransition> alone = service.Transitions(service.Import(File("gpt-flash-s4"), "first"));
  ASSERT_FALSE(alone.empty());
  for (const AlertTransition& transition : alone) {
    EXPECT_EQ(transition.siblings, "");
    for (const Evidence& evidence : transition.evidence) EXPECT_EQ(evidence.siblings.runs, 0u);
  }
  for (const char* const name : kHealthy) service.Import(File(name), name);
  service.Import(File("gpt-qknorm-s4"), "of-another-kind");

  const std::vector<AlertTransition> told = service.Transitions(service.Import(File("gpt-flash-s4"), "again"));
  EXPECT_EQ(service.count("bellwether_baseline_runs_total", {{"result", "ill"}}), 2);
  const AlertTransition* const drift = FirstOf(told, "drift");
  ASSERT_NE(drift, nullptr);
  ASSERT_FALSE(drift->evidence.empty());
  const Evidence& evidence = drift->evidence.front();
  EXPECT_EQ(evidence.siblings.runs, 3u);
  EXPECT_LE(evidence.siblings.step_begin, drift->step);
  EXPECT_GT(evidence.siblings.step_end, drift->step);
  EXPECT_GT(evidence.value, evidence.siblings.p99) << drift->siblings;
  EXPECT_LT(evidence.siblings.p50, evidence.siblings.p99);
  EXPECT_THAT(drift->siblings, AllOf(HasSubstr(evidence.signal), HasSubstr("3 earlier healthy runs")));

  // Nothing else is concluded, or said otherwise, for knowing them.
  std::vector<std::string> before = TextsOf(alone), after = TextsOf(told);
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t name = after[i].find("again:");
    if (name != std::string::npos) after[i].replace(name, 6, "first:");
    EXPECT_EQ(before[i], after[i]);
  }
}

TEST(SiblingsTest, ARestartKeepsWhatWasLearnedAndWhatWasTold) {
  ServiceStack service;
  for (const char* const name : kHealthy) service.Import(File(name), name);
  const RunId ill = service.Import(File("gpt-flash-s12"), "ill");
  const auto text = [&] {
    std::vector<std::string> texts;
    for (const AlertTransition& transition : service.Transitions(ill)) texts.push_back(transition.siblings);
    return texts;
  };
  const std::vector<std::string> before = text();
  ASSERT_THAT(before, testing::Contains(HasSubstr("3 earlier healthy runs")));
  const double learned = service.count("bellwether_baseline_runs_total", {{"result", "learned"}});
  EXPECT_EQ(learned, 3);
  service.Restart();
  EXPECT_EQ(text(), before);
  EXPECT_EQ(service.count("bellwether_baseline_runs_total", {{"result", "learned"}}), learned) << "read again";
  ASSERT_THAT(service.engine().baselines()->List(), SizeIs(1));
  EXPECT_THAT(service.engine().baselines()->List()[0], SizeIs(3));
  const std::vector<AlertTransition> next = service.Transitions(service.Import(File("gpt-flash-s17"), "next"));
  const AlertTransition* const drift = FirstOf(next, "drift");
  ASSERT_NE(drift, nullptr);
  EXPECT_EQ(drift->evidence.front().siblings.runs, 3u);
}

TEST(SiblingsTest, RunHasNoSiblingsAfterAKernelChange) {
  ServiceStack service;
  for (const char* const name : kHealthy) service.Import(File(name), name);
  const RunId rescued = service.Import(File("gpt-flash-center-at-4000-s4"), "rescued");
  int with = 0;
  for (const AlertTransition& transition : service.Transitions(rescued)) {
    EXPECT_TRUE(transition.step < 4000 || transition.siblings.empty()) << transition.step;
    with += !transition.siblings.empty();
  }
  EXPECT_GT(with, 0);
  EXPECT_TRUE(service.engine().runs()->Get(rescued)->record.kind_changed);
}

// A stream that nobody listens to.
class Deaf final : public SessionOwner {
 public:
  void OnOpen(uint64_t) override {}
  void OnDurable(uint64_t) override {}
  void OnRoom() override {}
  void OnDeeper(const std::vector<Head>&) override {}
  void OnAction(const Action&) override {}
  void OnFenced() override {}
};

TEST(SiblingsTest, ARestartWithAnotherKernelMakesARunNoExample) {
  ServiceStack service;
  for (const char* const kernel : {"flash", "cudnn"}) {
    const std::string name = std::string("restarted-with-") + kernel;
    const RunId run = service.Import(File(kHealthy[0]), name);
    ASSERT_NE(service.engine().baselines()->Get(run), nullptr);
    HelloMessage hello;
    hello.run = service.engine().runs()->Get(run)->record.description;
    hello.run.attempt += 1;
    hello.run.attention.kernel = kernel;
    v1::ClientMessage message;
    message.mutable_hello()->set_protocol(kProtocolVersion);
    *message.mutable_hello()->mutable_run() = ToProto(hello.run);
    Deaf owner;
    const auto session = service.engine().ingest()->Open(hello, message.SerializeAsString(), &owner);
    ASSERT_TRUE(session.ok()) << session.status();
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    (*session)->Bye({0, ByeMessage{ByeMessage::Reason::kFinished}}, bye.SerializeAsString());
    (*session)->Detach();
    service.engine().ingest()->AwaitApplied(run);
    service.engine().AwaitLearned();
    const auto learned = service.engine().baselines()->Get(run);
    if (std::string(kernel) == "flash") {
      ASSERT_NE(learned, nullptr) << "it went on as it was";
      EXPECT_EQ(learned->attempt, 1u);
    } else {
      EXPECT_EQ(learned, nullptr);
    }
  }
}

}  // namespace
}  // namespace bellwether::server

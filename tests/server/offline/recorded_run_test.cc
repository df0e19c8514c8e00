// Goal: a recording whose ranks name their tensors is walked as its run was lived: one
// order of rows, whatever a rank counts, and nothing beyond what was named.
// Method: recordings of two ranks, written here.

#include "server/offline/recorded_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "bellwether/recording.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;

struct Kept final : RunListener {
  void OnHello(const RunDescription&) override {}
  void OnRows(const RunRows& rows) override { names = rows.tensors.names(); }
  void OnSample(const StepSample& sample) override { samples.push_back(sample); }
  void OnEvent(const RunEvent&) override {}
  std::vector<std::string> names;
  std::vector<StepSample> samples;
};

class RecordedRunTest : public testing::Test {
 protected:
  RecordedRunTest() {
    for (uint32_t rank : {0u, 1u}) {
      v1::Hello hello;
      hello.set_protocol(1);
      hello.set_rank(rank);
      v1::RunDescription* run = hello.mutable_run();
      run->set_name("r");
      run->set_uuid(std::string(16, '\7'));
      run->set_world(2);
      run->set_reporters(2);
      run->mutable_layout()->set_layers(1);
      run->mutable_layout()->set_heads(1);
      run->mutable_layout()->set_kv_heads(1);
      *Message(rank)->mutable_hello() = hello;
    }
  }

  v1::ClientMessage* Message(uint32_t rank) {
    messages_.emplace_back().set_rank(rank);
    v1::ClientMessage* message = messages_.back().mutable_message();
    message->set_seq(messages_.size());
    return message;
  }
  void Name(uint32_t rank, const std::vector<std::string>& names) {
    v1::Names* message = Message(rank)->mutable_names();
    message->set_granularity(v1::GRANULARITY_TENSOR);
    message->mutable_names()->Add(names.begin(), names.end());
  }
  void Sums(uint32_t rank, int64_t step, const std::vector<float>& values) {
    v1::Frame* frame = Message(rank)->mutable_frame();
    frame->set_step(step);
    frame->set_parts(1);
    v1::Block* block = frame->add_blocks();
    block->set_signal(v1::SIGNAL_REPLICA_SUM_LOW);
    block->set_layer_count(static_cast<uint32_t>(values.size()));
    block->set_head_count(1);
    block->mutable_values()->Add(values.begin(), values.end());
  }
  void Walk() {
    const std::string path = directory_.path() + "/r.bwrun";
    std::ofstream file(path, std::ios::binary);
    RecordingWriter writer([&file](std::string_view bytes) { return static_cast<bool>(file << bytes); });
    for (const v1::RecordedMessage& message : messages_) ASSERT_TRUE(writer.Write(message));
    ASSERT_TRUE(writer.Finish());
    file.close();
    const absl::Status walked = WalkRecordedRun(path, &walked_);
    ASSERT_TRUE(walked.ok()) << walked;
  }

  TempDirectory directory_;
  std::vector<v1::RecordedMessage> messages_;
  Kept walked_;
};

TEST_F(RecordedRunTest, RowsAreTheRunsWhateverARankCounts) {
  Name(0, {"a", "b"});
  Sums(0, 0, {1, 2});
  Name(1, {"c", "b"});
  Sums(1, 0, {3, 9});
  Walk();
  EXPECT_THAT(walked_.names, ElementsAre("a", "b", "c"));
  ASSERT_EQ(walked_.samples.size(), 1u);
  const StepSample& sample = walked_.samples[0];
  EXPECT_THAT(sample.matrix(SignalId::kReplicaSumLow), ElementsAre(1, 2, 3));
  ASSERT_EQ(sample.disagreements.size(), 1u);
  EXPECT_EQ(sample.disagreements[0].layer, 1);
  EXPECT_THAT(sample.disagreements[0].ranks, ElementsAre(1u));
}

TEST_F(RecordedRunTest, ValuesWithoutANameAreLeftOut) {
  Name(0, {"a"});
  Sums(0, 0, {1, 2, 3});
  Sums(1, 0, {5});
  Walk();
  ASSERT_EQ(walked_.samples.size(), 1u);
  EXPECT_THAT(walked_.samples[0].matrix(SignalId::kReplicaSumLow), ElementsAre(1));
}

}  // namespace
}  // namespace bellwether::server

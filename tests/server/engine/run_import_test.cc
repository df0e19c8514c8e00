// Goal: an import that was cut off can be made again, and gives what one that was not
// would; nobody's run is imported over, and no other recording is mixed into it.
// Method: a whole engine on real files, recordings of two ranks made here, in
// part and whole; a crash as a copy of its folder.

#include "server/ingest/run_import.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bellwether/recording.h"
#include "bellwether/signal_table.h"
#include "server/engine/engine.h"
#include "server/ingest/decode.h"
#include "tests/support/crash_copy.h"
#include "tests/support/hurrying_clock.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSteps = 300;
constexpr uint32_t kRanks = 2;

v1::RecordedMessage Recorded(uint32_t rank, v1::ClientMessage message) {
  v1::RecordedMessage recorded;
  recorded.set_rank(rank);
  *recorded.mutable_message() = std::move(message);
  return recorded;
}

// Steps in [0, steps) of each rank, readable up to each of them; `half` gets what is
// written up to the middle.
std::string MakeRecording(const std::string& model, int64_t steps, std::string* half = nullptr) {
  std::string bytes;
  RecordingWriter writer([&bytes](std::string_view more) {
    bytes.append(more);
    return true;
  });
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    v1::ClientMessage hello;
    hello.mutable_hello()->set_protocol(kProtocolVersion);
    hello.mutable_hello()->set_rank(rank);
    v1::RunDescription* const run = hello.mutable_hello()->mutable_run();
    run->set_name("recorded");
    run->set_uuid(std::string(16, 'r'));
    run->set_world(kRanks);
    run->set_reporters(kRanks);
    run->set_model(model);
    for (const char* const label : {"a", "b", "c", "d"}) (*run->mutable_labels())[label] = label;
    run->mutable_layout()->set_layers(1);
    run->mutable_layout()->set_heads(2);
    run->mutable_layout()->set_kv_heads(2);
    EXPECT_TRUE(writer.Write(Recorded(rank, hello)));
  }
  for (int64_t step = 0; step < steps; ++step) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      v1::ClientMessage frame;
      frame.set_seq(static_cast<uint64_t>(step) + 1);
      frame.mutable_frame()->set_step(step);
      frame.mutable_frame()->set_parts(1);
      v1::Block* const block = frame.mutable_frame()->add_blocks();
      block->set_signal(v1::SIGNAL_WQ_SIGMA);
      block->set_layer_count(1);
      block->set_head_begin(rank);
      block->set_head_count(1);
      block->add_values(1.0f + static_cast<float>(step % 17) / 100 + static_cast<float>(rank));
      EXPECT_TRUE(writer.Write(Recorded(rank, frame)));
      // Of the step in the middle one rank's part is missing.
      if (half != nullptr && step == steps / 2 && rank == 0) {
        EXPECT_TRUE(writer.Flush());
        *half = bytes;
      }
    }
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    EXPECT_TRUE(writer.Write(Recorded(rank, bye)));
  }
  EXPECT_TRUE(writer.Finish());
  return bytes;
}

class RunImportTest : public testing::Test {
 protected:
  std::unique_ptr<Engine> Open(const std::string& folder, Clock* clock = Clock::System()) {
    Engine::Options options;
    options.storage_path = folder;
    auto engine = Engine::Open(options, &counters_, clock);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  static absl::StatusOr<RunImport::Result> Import(Engine* engine, const std::string& bytes,
                                                  const std::string& name = "") {
    const std::unique_ptr<RunImport> import = engine->control()->StartImport(name, false);
    if (const absl::Status fed = import->Feed(bytes); !fed.ok()) return fed;
    return import->Finish();
  }
  static std::string Export(Engine* engine, const std::string& run) {
    std::string bytes;
    const auto sink = [&bytes](std::string_view more) {
      bytes.append(more);
      return true;
    };
    const RunSnapshotPtr found = engine->runs()->Find(run);
    EXPECT_NE(found, nullptr);
    if (found == nullptr) return bytes;
    EXPECT_TRUE(engine->control()->Export(found->record.id, sink).ok());
    return bytes;
  }
  std::string Path(const std::string& name) { return directory_.path() + "/" + name; }
  std::string Whole(const std::string& bytes) {
    const auto engine = Open(Path("whole"));
    EXPECT_TRUE(Import(engine.get(), bytes).ok());
    return Export(engine.get(), "recorded");
  }

  TempDirectory directory_;
  Counters counters_;
};

TEST_F(RunImportTest, ImportKeepsWhetherPeopleAreNotified) {
  const TempDirectory folder;
  const std::string bytes = MakeRecording("model", 20);
  const auto told_of = [](Engine* engine, const char* name) {
    const RunSnapshotPtr run = engine->runs()->Find(name);
    return run == nullptr || (!run->record.import_of.empty() && run->record.notifies());
  };
  {
    const std::unique_ptr<Engine> engine = Open(folder.path());
    ASSERT_TRUE(Import(engine.get(), bytes, "quiet").ok());
    const std::unique_ptr<RunImport> loud = engine->control()->StartImport("loud", true);
    ASSERT_TRUE(loud->Feed(bytes).ok());
    ASSERT_TRUE(loud->Finish().ok());
    EXPECT_FALSE(told_of(engine.get(), "quiet"));
    EXPECT_TRUE(told_of(engine.get(), "loud"));
  }
  const std::unique_ptr<Engine> again = Open(folder.path());
  EXPECT_FALSE(told_of(again.get(), "quiet"));
  EXPECT_TRUE(told_of(again.get(), "loud"));
}

TEST_F(RunImportTest, CutOffImportCanBeRepeated) {
  std::string half;
  const std::string bytes = MakeRecording("m", kSteps, &half);
  const std::string expected = Whole(bytes);
  HurryingClock clock;
  const auto engine = Open(Path("a"), &clock);
  {
    const auto cut = engine->control()->StartImport("", false);
    ASSERT_TRUE(cut->Feed(half).ok());
  }
  engine->ingest()->AwaitApplied(engine->runs()->Find("recorded")->record.id);
  EXPECT_FALSE(engine->runs()->Find("recorded")->record.ended);
  // Deadlines come and go meanwhile: the step that is open stays so, and nobody is silent.
  for (const int64_t until = clock.now() + 600'000'000'000; clock.now() < until;) {
    engine->ingest()->AwaitApplied(engine->runs()->Find("recorded")->record.id);
  }
  const auto again = Import(engine.get(), bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->frames, static_cast<uint64_t>(kSteps) * kRanks);
  const RunSnapshotPtr run = engine->runs()->Find("recorded");
  EXPECT_TRUE(run->record.ended);
  EXPECT_EQ(run->record.frames, static_cast<uint64_t>(kSteps) * kRanks);
  EXPECT_EQ(Export(engine.get(), "recorded"), expected);
  EXPECT_TRUE(engine->alerts()->List(run->record.id, false).empty());
  // Whole, it is not imported again.
  EXPECT_TRUE(absl::IsAlreadyExists(Import(engine.get(), bytes).status()));
}

TEST_F(RunImportTest, CutOffImportCanBeRepeatedBeforeItIsDurable) {
  std::string half;
  const std::string bytes = MakeRecording("m", kSteps, &half);
  const std::string expected = Whole(bytes);
  const auto engine = Open(Path("a"));
  ASSERT_TRUE(engine->control()->StartImport("", false)->Feed(half).ok());
  const auto again = Import(engine.get(), bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Export(engine.get(), "recorded"), expected);
}

TEST_F(RunImportTest, CutOffImportCanBeRepeatedAfterCrash) {
  std::string half;
  const std::string bytes = MakeRecording("m", kSteps, &half);
  const std::string expected = Whole(bytes);
  for (const bool saved : {false, true}) {  // Told by the log alone, or by the database.
    const std::string folder = Path(saved ? "saved" : "logged"), copy = folder + "-copy";
    {
      const auto engine = Open(folder);
      const auto cut = engine->control()->StartImport("", false);
      ASSERT_TRUE(cut->Feed(half).ok());
      if (saved) {
        engine->ingest()->AwaitApplied(engine->runs()->Find("recorded")->record.id);
        ASSERT_TRUE(engine->WriteCheckpoint(copy).ok());
      } else {
        engine->ingest()->AwaitApplied(engine->runs()->Find("recorded")->record.id);
        std::filesystem::create_directory(copy);
        CrashCopy(folder + "/wal", copy + "/wal");
      }
    }
    const auto engine = Open(copy);
    const auto again = Import(engine.get(), bytes);
    ASSERT_TRUE(again.ok()) << saved << again.status();
    EXPECT_EQ(Export(engine.get(), "recorded"), expected) << saved;
  }
}

TEST_F(RunImportTest, OtherRecordingIsNotMixedIn) {
  std::string half;
  const std::string bytes = MakeRecording("m", kSteps, &half);
  const auto engine = Open(Path("a"));
  {
    const auto cut = engine->control()->StartImport("x", false);
    ASSERT_TRUE(cut->Feed(half).ok());
    // While it goes on a second one pushes it out of nothing.
    const absl::Status second = Import(engine.get(), bytes, "x").status();
    EXPECT_TRUE(absl::IsAborted(second)) << second;
  }
  const absl::Status other = Import(engine.get(), MakeRecording("another", kSteps), "x").status();
  EXPECT_TRUE(absl::IsAlreadyExists(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("another recording"));
  engine->ingest()->AwaitApplied(engine->runs()->Find("x")->record.id);
  const auto whole = Import(engine.get(), bytes, "x");
  EXPECT_TRUE(whole.ok()) << whole.status();
}

class ImportTrainer final : public IngestTrainer {
 public:
  explicit ImportTrainer(Engine* engine) {
    v1::ClientMessage message;
    message.mutable_hello()->mutable_run()->set_name("recorded");
    message.mutable_hello()->mutable_run()->set_uuid(std::string(16, 'r'));
    Greet(engine->ingest(), std::move(message), /*world=*/1, /*layers=*/1);
  }
  ~ImportTrainer() override { session_->Detach(); }
};

TEST_F(RunImportTest, TrainersRunIsNotImportedInto) {
  std::string half;
  const std::string bytes = MakeRecording("m", kSteps, &half);
  {
    const auto engine = Open(Path("a"));
    { const ImportTrainer away(engine.get()); }
    const absl::Status refused = Import(engine.get(), bytes).status();
    EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  }
  // Neither one that a trainer goes on with where an import was cut off.
  const auto engine = Open(Path("b"));
  {
    const auto cut = engine->control()->StartImport("", false);
    ASSERT_TRUE(cut->Feed(half).ok());
  }
  const RunId run = engine->runs()->Find("recorded")->record.id;
  { const ImportTrainer away(engine.get()); }
  engine->ingest()->AwaitApplied(run);
  EXPECT_TRUE(absl::IsAlreadyExists(Import(engine.get(), bytes).status()));
}

// What was refused leaves no run that waits for more, and keeps none that is right away.
TEST_F(RunImportTest, BytesBehindEndOfRecordingAreRefused) {
  const std::string bytes = MakeRecording("m", kSteps);
  const std::string expected = Whole(bytes);
  const auto engine = Open(Path("a"));
  for (const bool at_once : {true, false}) {
    const std::unique_ptr<RunImport> import = engine->control()->StartImport(at_once ? "once" : "twice", false);
    absl::Status refused = import->Feed(at_once ? bytes + "more" : bytes);
    if (!at_once) refused = import->Feed("more");
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes follow its end"));
    EXPECT_TRUE(engine->runs()->Find(at_once ? "once" : "twice")->record.ended);
  }
  ASSERT_TRUE(absl::IsInvalidArgument(Import(engine.get(), bytes + "more").status()));
  const auto again = Import(engine.get(), bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(engine->runs()->Find("recorded")->record.end_reason, "finished");
  EXPECT_EQ(Export(engine.get(), "recorded"), expected);
}

TEST_F(RunImportTest, TwoRunsInOneRecordingAreRefused) {
  const auto with_second = [](const std::string& name, char uuid) {
    std::string bytes;
    RecordingWriter writer([&bytes](std::string_view more) {
      bytes.append(more);
      return true;
    });
    for (const bool second : {false, true}) {
      v1::ClientMessage hello;
      hello.mutable_hello()->mutable_run()->set_name(second ? name : "first");
      hello.mutable_hello()->mutable_run()->set_uuid(std::string(16, second ? uuid : 'f'));
      hello.mutable_hello()->set_rank(second ? 1 : 0);
      EXPECT_TRUE(writer.Write(Recorded(second ? 1 : 0, HelloOf(std::move(hello), /*world=*/2, /*layers=*/1))));
    }
    EXPECT_TRUE(writer.Finish());
    return bytes;
  };
  const auto engine = Open(Path("a"));
  for (const char* const as_name : {"", "another"}) {
    const absl::Status names = Import(engine.get(), with_second("second", 's'), as_name).status();
    EXPECT_TRUE(absl::IsInvalidArgument(names)) << names;
    EXPECT_THAT(std::string(names.message()), HasSubstr("the recording holds \"first\" and \"second\""));
    const absl::Status uuids = Import(engine.get(), with_second("first", 's'), as_name).status();
    EXPECT_TRUE(absl::IsInvalidArgument(uuids)) << uuids;
  }
  EXPECT_EQ(engine->runs()->Find("second"), nullptr);
  for (const RunSnapshotPtr& run : engine->runs()->List()) EXPECT_TRUE(run->record.ended);
}

// More than a frame may have blocks of: a client sends them in parts, and the server has them as one.
TEST_F(RunImportTest, StepOfManySignalsIsImportedAgain) {
  std::string bytes;
  RecordingWriter writer([&bytes](std::string_view more) {
    bytes.append(more);
    return true;
  });
  v1::ClientMessage hello;
  hello.mutable_hello()->mutable_run()->set_name("recorded");
  hello.mutable_hello()->mutable_run()->set_uuid(std::string(16, 'r'));
  EXPECT_TRUE(writer.Write(Recorded(0, HelloOf(std::move(hello), /*world=*/1, /*layers=*/1))));
  std::vector<v1::ClientMessage> parts;
  for (const SignalInfo& signal : std::span(SignalTable(), SignalCount())) {
    const int heads = OfHeads(signal.granularity) ? 2 : 1;
    if (signal.derived || (heads == 1 && signal.granularity != Granularity::kRun)) continue;
    if (parts.empty() || parts.back().frame().blocks_size() == DecodeLimits().blocks_max) parts.emplace_back();
    v1::Block* const block = parts.back().mutable_frame()->add_blocks();
    block->set_signal(static_cast<v1::Signal>(signal.id));
    block->set_layer_count(1);
    block->set_head_count(static_cast<uint32_t>(heads));
    for (int head = 0; head < heads; ++head) block->add_values(1.5f);
  }
  ASSERT_GT(parts.size(), 1u);
  for (size_t part = 0; part < parts.size(); ++part) {
    parts[part].set_seq(part + 1);
    parts[part].mutable_frame()->set_part(static_cast<uint32_t>(part));
    parts[part].mutable_frame()->set_parts(static_cast<uint32_t>(parts.size()));
    EXPECT_TRUE(writer.Write(Recorded(0, parts[part])));
  }
  v1::ClientMessage bye;
  bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
  EXPECT_TRUE(writer.Write(Recorded(0, bye)));
  EXPECT_TRUE(writer.Finish());
  const auto engine = Open(Path("many"));
  ASSERT_TRUE(Import(engine.get(), bytes).ok());
  const auto again = Import(engine.get(), Export(engine.get(), "recorded"), "again");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->frames, parts.size());
}

}  // namespace
}  // namespace bellwether::server

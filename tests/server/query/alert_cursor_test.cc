// Goal: a reader gets every transition once and in order, whatever is posted
// while he reads and from wherever he resumes; one who falls behind is told
// so and misses nothing by asking again.
// Method: several threads post while several readers read; each reader's ids
// must be exactly those of the log.  Waits have a deadline, nothing sleeps.
#include "server/query/alert_cursor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/store/shared_rows.h"
#include "tests/support/query_stack.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using Kind = AlertCursor::Item::Kind;

// Wakes a thread that waits for a cursor.
class TimerThread {
 public:
  void Ring() {
    absl::MutexLock lock(&mutex_);
    rung_ = true;
  }
  bool Await(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const bool rung = mutex_.AwaitWithDeadline(absl::Condition(&rung_), deadline);
    rung_ = false;
    return rung;
  }

 private:
  absl::Mutex mutex_;
  bool rung_ ABSL_GUARDED_BY(mutex_) = false;
};

class AlertCursorTest : public ::testing::Test {
 protected:
  AlertCursorTest() : run_(stack_.AddRun({.name = "r", .steps = 2})) {}

  uint64_t Post(const std::string& key, Severity severity = Severity::kWarning, size_t bytes = 40) {
    return stack_.Post(stack_.MakeTransition(run_, key, 0, AlertState::kFiring, severity, bytes)).id;
  }
  std::unique_ptr<AlertCursor> Open(uint64_t after, AlertCursor::Filter filter = {},
                                    AlertCursor::Options options = {}) {
    return std::make_unique<AlertCursor>(options, &stack_.alerts(), filter, after, [] {});
  }

  QueryStack stack_;
  const RunId run_;
};

// A store of all servers, which can be away.
class Numbers final : public SharedRows {
 public:
  bool away = false;

  absl::Status PutRows(RunId, const std::vector<SharedRow>&) override { return absl::OkStatus(); }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    if (away) return absl::UnavailableError("away");
    transition->id = stored_.size() + 1;
    stored_.push_back(*transition);
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t) const override {
    return std::vector<AlertTransition>(stored_.begin() + static_cast<ptrdiff_t>(after), stored_.end());
  }

 private:
  std::vector<AlertTransition> stored_;
};

TEST_F(AlertCursorTest, UnstoredAlertComesAtOnceAndLaterWithItsId) {
  const TempDirectory directory;
  Numbers numbers;
  Database::Options options;
  options.directory = directory.path() + "/db";
  options.shared = &numbers;
  const auto database = Database::Open(options);
  ASSERT_TRUE(database.ok()) << database.status();
  AlertStore log(database->get());
  ASSERT_TRUE(log.Load().ok());
  AlertCursor cursor({.unstored_max = 2}, &log, {}, 0, [] {});
  EXPECT_EQ(cursor.Next()->kind, Kind::kCaughtUp);
  numbers.away = true;
  for (const char* const key : {"a", "b", "c"}) {
    EXPECT_FALSE(log.Post(stack_.MakeTransition(run_, key, 0, AlertState::kFiring, Severity::kWarning, 40)).ok());
  }
  AlertCursor late({.unstored_max = 2}, &log, {}, 0, [] {});
  EXPECT_EQ(late.Next()->kind, Kind::kCaughtUp) << "what is stored, first";
  for (AlertCursor* const each : {&cursor, &late}) {
    for (const char* const key : {"a", "b"}) {
      const auto item = each->Next();
      ASSERT_EQ(item->kind, Kind::kTransition);
      EXPECT_EQ(item->transition.id, 0u);
      EXPECT_EQ(item->transition.key, key);
    }
    EXPECT_EQ(each->Next()->kind, Kind::kNone) << "more than it may keep";
  }
  numbers.away = false;
  ASSERT_TRUE(log.StoreWaiting().ok());
  for (AlertCursor* const each : {&cursor, &late}) {
    for (const uint64_t id : {1u, 2u, 3u}) EXPECT_EQ(each->Next()->transition.id, id);
    EXPECT_EQ(each->Next()->kind, Kind::kNone);
  }
}

TEST_F(AlertCursorTest, HistoryThenCaughtUpThenLive) {
  const uint64_t first = Post("a");
  const uint64_t second = Post("b");
  const auto cursor = Open(0);
  auto item = cursor->Next();
  EXPECT_EQ(item->transition.id, first);
  EXPECT_EQ(cursor->Next()->transition.id, second);
  EXPECT_EQ(cursor->Next()->kind, Kind::kCaughtUp);
  EXPECT_EQ(cursor->Next()->kind, Kind::kNone);
  const uint64_t third = Post("c");
  EXPECT_EQ(cursor->Next()->transition.id, third);
  EXPECT_EQ(cursor->Next()->kind, Kind::kNone);
}

TEST_F(AlertCursorTest, ResumesAfterAnIdOrFromNow) {
  const uint64_t first = Post("a");
  const uint64_t second = Post("b");
  const auto resumed = Open(first);
  EXPECT_EQ(resumed->Next()->transition.id, second);
  const auto only_new = Open(UINT64_MAX);
  const auto caught_up = only_new->Next();
  EXPECT_EQ(caught_up->kind, Kind::kCaughtUp);
  const uint64_t third = Post("c");
  EXPECT_EQ(Open(caught_up->after)->Next()->transition.id, third) << "who lost his place before anything came";
  EXPECT_EQ(only_new->Next()->transition.id, third);
  EXPECT_EQ(Open(third + 1)->Next().status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(AlertCursorTest, FiltersByRunAndSeverity) {
  const RunId other = stack_.AddRun({.name = "other", .steps = 2});
  Post("a", Severity::kInfo);
  const uint64_t wanted = Post("b", Severity::kCritical);
  stack_.Post(stack_.MakeTransition(other, "x", 0, AlertState::kFiring, Severity::kCritical));
  const auto cursor = Open(0, {.run = run_, .severity_min = Severity::kWarning});
  EXPECT_EQ(cursor->Next()->transition.id, wanted);
  EXPECT_EQ(cursor->Next()->kind, Kind::kCaughtUp);
  stack_.Post(stack_.MakeTransition(other, "y", 0, AlertState::kFiring, Severity::kCritical));
  Post("c", Severity::kInfo);
  EXPECT_EQ(cursor->Next()->kind, Kind::kNone);
  const uint64_t live = Post("d", Severity::kWarning);
  EXPECT_EQ(cursor->Next()->transition.id, live);
}

TEST_F(AlertCursorTest, FilteredCursorScansBoundedPagesAtATime) {
  const RunId other = stack_.AddRun({.name = "other", .steps = 2});
  for (int i = 0; i < 100; ++i) Post(absl::StrCat("a", i));
  const uint64_t wanted =
      stack_.Post(stack_.MakeTransition(other, "b", 0, AlertState::kFiring, Severity::kWarning, 40)).id;
  for (const AlertCursor::Filter& filter :
       {AlertCursor::Filter{.run = other},
        AlertCursor::Filter{.sees = [](const std::string& r) { return r == "other"; }}}) {
    int woken = 0;
    AlertCursor cursor({.page_transitions = 5, .pages_max = 4}, &stack_.alerts(), filter, 0, [&] { ++woken; });
    int none = 0;
    auto item = cursor.Next();
    for (; item.ok() && item->kind == Kind::kNone && none < 100; item = cursor.Next()) ++none;
    ASSERT_TRUE(item.ok());
    EXPECT_EQ(item->transition.id, wanted);
    EXPECT_EQ(none, 5) << "101 of them, 20 at a time";
    EXPECT_EQ(woken, none);
    EXPECT_EQ(cursor.Next()->kind, Kind::kCaughtUp);
  }
}

TEST_F(AlertCursorTest, CursorThatFallsBehindResyncsWithoutAGap) {
  // 1 KiB each and a little more: three are within the bound, forty are not.
  const AlertCursor::Options options{.behind_bytes_max = 16 << 10};
  const auto cursor = Open(0, {}, options);
  EXPECT_EQ(cursor->Next()->kind, Kind::kCaughtUp);
  std::vector<uint64_t> posted, got;
  for (int i = 0; i < 3; ++i) posted.push_back(Post(absl::StrCat("k", i), Severity::kWarning, 1 << 10));
  for (int i = 0; i < 3; ++i) got.push_back(cursor->Next()->transition.id);
  for (int i = 3; i < 40; ++i) posted.push_back(Post(absl::StrCat("k", i), Severity::kWarning, 1 << 10));
  const auto resync = cursor->Next();
  ASSERT_EQ(resync->kind, Kind::kResync);
  EXPECT_EQ(resync->after, got.back());
  EXPECT_EQ(cursor->Next()->kind, Kind::kNone);
  // History is no backlog: the second time all of it comes.
  const auto again = Open(resync->after, {}, options);
  for (;;) {
    const auto item = again->Next();
    if (item->kind != Kind::kTransition) break;
    got.push_back(item->transition.id);
  }
  EXPECT_EQ(got, posted);
}

TEST_F(AlertCursorTest, TheBoundIsInBytesAndExact) {
  // Two transitions of the same size: a bound of exactly both holds, one byte
  // less does not.  The size is found by the bound itself.
  const auto behind = [this](int64_t bound, const std::string& tag) {
    const auto cursor = Open(UINT64_MAX, {}, {.behind_bytes_max = bound});
    EXPECT_EQ(cursor->Next()->kind, Kind::kCaughtUp);
    Post(tag + "1", Severity::kWarning, 4096);
    Post(tag + "2", Severity::kWarning, 4096);
    return cursor->Next()->kind == Kind::kResync;
  };
  int64_t low = 0, high = 1 << 20;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (behind(middle, absl::StrFormat("%07d", middle)) ? low : high) = middle;
  }
  EXPECT_GE(high, 2 * 4096);
  EXPECT_LE(high, 4 * 4096);
  EXPECT_FALSE(behind(high, "aaaaaaa"));
  EXPECT_TRUE(behind(high - 1, "bbbbbbb"));
}

TEST_F(AlertCursorTest, NoGapNoDuplicateWhileManyPost) {
  constexpr int kPosters = 4, kEach = 250, kReaders = 4;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  std::vector<std::thread> threads;
  std::vector<std::vector<uint64_t>> got(kReaders);
  std::atomic<bool> failed = false;
  for (int r = 0; r < kReaders; ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<uint32_t>(r));
      uint64_t after = 0;
      while (got[static_cast<size_t>(r)].size() < kPosters * kEach && !failed) {
        TimerThread bell;
        const AlertCursor::Options options{.page_transitions = 1 + random() % 7, .behind_bytes_max = 64 << 10};
        AlertCursor cursor(options, &stack_.alerts(), {}, after, [&bell] { bell.Ring(); });
        // Leaves now and then, as a client that reconnects.
        int left = static_cast<int>(random() % 200) + 1;
        while (left > 0 && got[static_cast<size_t>(r)].size() < kPosters * kEach) {
          const auto item = cursor.Next();
          if (!item.ok()) {
            failed = true;
            return;
          }
          if (item->kind == Kind::kResync) {
            after = item->after;
            break;
          }
          if (item->kind == Kind::kTransition) {
            after = item->transition.id;
            got[static_cast<size_t>(r)].push_back(after);
            --left;
          } else if (item->kind == Kind::kNone && !bell.Await(deadline)) {
            failed = true;
            return;
          }
        }
      }
    });
  }
  for (int p = 0; p < kPosters; ++p) {
    threads.emplace_back([this, p] {
      for (int i = 0; i < kEach; ++i) Post(absl::StrCat("p", p, "/", i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(failed);
  std::vector<uint64_t> expected(kPosters * kEach);
  std::iota(expected.begin(), expected.end(), uint64_t{1});
  for (const auto& ids : got) EXPECT_EQ(ids, expected);
}

}  // namespace
}  // namespace bellwether::server

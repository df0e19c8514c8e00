// Goal: readers find the newest snapshot by id, name and uuid, and a change
// wakes them.
// Method: a handful of runs, one of them renamed over; a waiting thread.
#include "server/store/run_table.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/support/memory_database.h"

namespace bellwether::server {
namespace {

RunSnapshotPtr Snapshot(RunId id, const std::string& name, int64_t step = 0) {
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record.id = id;
  snapshot->record.step = step;
  snapshot->record.description.name = name;
  snapshot->record.description.uuid[0] = static_cast<uint8_t>(id);
  return snapshot;
}

TEST(RunTableTest, FindsTheNewestOfANameAndAnyByUuid) {
  RunTable table;
  table.Publish(Snapshot(1, "a"));
  table.Publish(Snapshot(2, "a"));
  table.Publish(Snapshot(2, "a", 9));
  EXPECT_EQ(table.Find("a")->record.id, 2u);
  EXPECT_EQ(table.Find("a")->record.step, 9);
  EXPECT_EQ(table.Find(FormatUuid(Snapshot(1, "")->record.description.uuid))->record.id, 1u);
  EXPECT_EQ(table.Find("b"), nullptr);
  EXPECT_EQ(table.Get(3), nullptr);
  EXPECT_EQ(table.List().size(), 2u);
  table.Remove(2);
  EXPECT_EQ(table.Find("a")->record.id, 1u);
}

TEST(RunTableTest, NewestRunOfANameIsTheLastStarted) {
  RunTable table;
  for (const RunId id : {1, 2, 3}) {
    auto snapshot = std::make_shared<RunSnapshot>(*Snapshot(id, "a"));
    snapshot->record.started_unix_ns = id == 2 ? 20 : 10;
    table.Publish(snapshot);
  }
  EXPECT_EQ(table.Find("a")->record.id, 2u);
}

TEST(RunTableTest, EventsAreThoseOfTheSnapshot) {
  MemoryDatabase database;
  const auto store = [&](int64_t step) { database.AddEvent(1, {.step = step}); };
  const auto steps = [&](const RunSnapshot& snapshot) {
    const auto events = EventsOf(snapshot, database, 0, 100);
    std::vector<int64_t> out;
    for (const RunEvent& event : *events) out.push_back(event.step);
    EXPECT_EQ(*CountEventsOf(snapshot, database), out.size());
    EventReader reader(&snapshot, &database);
    std::vector<int64_t> read;
    for (; *reader.Peek() != nullptr; reader.Pop()) read.push_back((*reader.Peek())->step);
    EXPECT_EQ(read, out);
    // Pages of any size, also across what is stored and what is not.
    for (size_t count = 1; count <= out.size() + 1; ++count) {
      std::vector<int64_t> pages;
      for (size_t at = 0; at < out.size(); at += count) {
        const auto page = EventsOf(snapshot, database, at, count);
        for (const RunEvent& event : *page) pages.push_back(event.step);
      }
      EXPECT_EQ(pages, out) << count;
    }
    EXPECT_TRUE(EventsOf(snapshot, database, out.size(), 1)->empty());
    EXPECT_TRUE(EventsOf(snapshot, database, UINT64_MAX, 1)->empty());
    return out;
  };
  store(10);
  RunSnapshot snapshot;
  snapshot.record.id = 1;
  EXPECT_EQ(steps(snapshot), (std::vector<int64_t>{10}));
  snapshot.events_stored = 1;
  snapshot.events_new = std::make_shared<std::vector<RunEvent>>(std::vector<RunEvent>{{.step = 20}, {.step = 30}});
  EXPECT_EQ(steps(snapshot), (std::vector<int64_t>{10, 20, 30}));
  store(20);
  store(30);
  store(40);
  EXPECT_EQ(steps(snapshot), (std::vector<int64_t>{10, 20, 30}));
}

TEST(RunTableTest, AwaitChangeWakesOnPublishAndGivesUpInTime) {
  RunTable table;
  EXPECT_EQ(table.AwaitChange(0, 1), 0u);
  std::thread publisher([&table] { table.Publish(Snapshot(1, "a")); });
  EXPECT_EQ(table.AwaitChange(0, 60'000), 1u);
  publisher.join();
  EXPECT_EQ(table.version(), 1u);
}

TEST(RunTableTest, UuidTextIsThirtyTwoHexadecimalDigits) {
  RunUuid uuid{}, back{};
  for (size_t i = 0; i < uuid.size(); ++i) uuid[i] = static_cast<uint8_t>(i * 17);
  const std::string text = FormatUuid(uuid);
  EXPECT_EQ(text, "00112233445566778899aabbccddeeff");
  EXPECT_TRUE(ParseUuid(text, &back));
  EXPECT_EQ(back, uuid);
  EXPECT_FALSE(ParseUuid(text.substr(1), &back));
  std::string not_hex = text;
  not_hex[0] = 'g';
  EXPECT_FALSE(ParseUuid(not_hex, &back));
}

}  // namespace
}  // namespace bellwether::server

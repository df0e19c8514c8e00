// Goal: a chunk gives back every bit; no damaged chunk is read out of bounds;
// the mix stays within 2 bytes a value, cells that are not alike cost each other
// nothing.
// Method: values of every kind, irregular steps, every length; flips and cuts at
// random (seed printed); the signal mix that the bar names.
#include "server/store/chunk.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "bellwether/crc32c.h"
#include "server/model/step_sample.h"
#include "server/store/series_summary.h"
#include "server/util/byte_io.h"
#include "tests/support/signal_mix.h"

namespace bellwether::server {
namespace {

std::vector<int64_t> Steps(size_t n, int64_t first = 0, int64_t period = 1) {
  std::vector<int64_t> steps(n);
  for (size_t i = 0; i < n; ++i) steps[i] = first + static_cast<int64_t>(i) * period;
  return steps;
}

void ExpectRoundTrip(const std::vector<int64_t>& steps, const std::vector<float>& values, size_t cells) {
  const std::string bytes = EncodeChunk({.steps = steps, .values = values.data(), .cells = cells, .stride = cells});
  Chunk chunk;
  ASSERT_TRUE(DecodeChunk(bytes, &chunk).ok());
  EXPECT_EQ(chunk.steps, steps);
  EXPECT_EQ(chunk.cells, cells);
  ASSERT_EQ(chunk.values.size(), values.size());
  EXPECT_EQ(std::memcmp(chunk.values.data(), values.data(), values.size() * sizeof(float)), 0);
}

TEST(ChunkTest, GivesBackEveryBitPattern) {
  const uint32_t seed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const uint32_t special[] = {0,           0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                              0x7fa00001u, 0xffffffffu, 1,           0x7f7fffffu, kNotMeasuredBits};
  for (const size_t cells : {1u, 3u, 8u}) {
    for (const size_t n : {1u, 2u, 31u, 256u}) {
      std::vector<float> values(n * cells);
      for (float& value : values) {
        value = std::bit_cast<float>(random() % 2 ? special[random() % 10] : static_cast<uint32_t>(random()));
      }
      ExpectRoundTrip(Steps(n), values, cells);
    }
  }
}

TEST(ChunkTest, KeepsIrregularStepsAndRegularOnesCostNothing) {
  std::mt19937 random(8);
  std::vector<int64_t> steps = {-5};
  while (steps.size() < 256) steps.push_back(steps.back() + 1 + static_cast<int64_t>(random() % 1000));
  steps.back() = INT64_MAX;
  ExpectRoundTrip(steps, std::vector<float>(256, 1.5f), 1);
  const std::vector<float> zeros(256);
  const auto size = [&zeros](const std::vector<int64_t>& s) {
    return EncodeChunk({.steps = s, .values = zeros.data(), .cells = 1, .stride = 1}).size();
  };
  EXPECT_LE(size(Steps(256, 1'000'000, 10)), 64u);
}

TEST(ChunkTest, DamagedBytesGiveAnErrorOrAChunkNeverMore) {
  const uint32_t seed = 9;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<float> values(256 * 8);
  for (float& value : values) value = static_cast<float>(random());
  const auto steps = Steps(256);
  const ChunkInput input{.steps = steps, .values = values.data(), .cells = 8, .stride = 8};
  const std::string good = EncodeChunk(input);
  Chunk chunk;
  for (int i = 0; i < 3000; ++i) {
    // Exactly as large as it says: the sanitizer sees the first byte too many.
    std::string bad = good.substr(0, i % 3 == 0 ? random() % good.size() : good.size());
    if (!bad.empty())
      bad[random() % std::min<size_t>(bad.size(), i % 2 ? 24 : bad.size())] ^= static_cast<char>(1 << random() % 8);
    const std::vector<char> exact(bad.begin(), bad.end());
    if (DecodeChunk({exact.data(), exact.size()}, &chunk).ok()) {
      EXPECT_EQ(chunk.values.size(), chunk.steps.size() * chunk.cells);
    }
  }
  EXPECT_FALSE(DecodeChunk("", &chunk).ok());
  EXPECT_FALSE(DecodeChunk(good.substr(0, good.size() - 1), &chunk).ok());
}

// A clock beside constants, as in the signal of the steps themselves.
TEST(ChunkTest, FewCellsOfDifferentKindsDoNotCostEachOther) {
  std::mt19937 random(5);
  uint32_t clock = 3'000'000'000u;
  const auto steps = Steps(512);
  std::vector<float> all, alone;
  for (size_t t = 0; t < steps.size(); ++t) {
    clock += 5'000 + static_cast<uint32_t>(random() % 2'000);
    alone.push_back(std::bit_cast<float>(clock));
    all.insert(all.end(), {alone.back(), 1.0f, std::bit_cast<float>(64u), 0.0f});
  }
  const size_t together = EncodeChunk({.steps = steps, .values = all.data(), .cells = 4, .stride = 4}).size();
  const size_t single = EncodeChunk({.steps = steps, .values = alone.data(), .cells = 1, .stride = 1}).size();
  EXPECT_LE(together, single + 150) << "three constants beside it";
  ExpectRoundTrip(steps, all, 4);
}

TEST(ChunkTest, TheSignalMixStaysWithinTheBar) {
  const auto mix = testing_support::SignalMix(/*seed=*/1, /*steps=*/256, /*heads=*/64);
  const auto steps = Steps(256);
  size_t bytes = 0, count = 0;
  for (const auto& signal : mix) {
    for (size_t head = 0; head < 64; head += 8) {
      const ChunkInput input{.steps = steps, .values = signal.data() + head, .cells = 8, .stride = 64};
      bytes += EncodeChunk(input).size() + EncodeSpans(Summarize(input), 0, 8).size();
      count += 256 * 8;
    }
  }
  const double each = static_cast<double>(bytes) / static_cast<double>(count);
  RecordProperty("bytes_per_value", std::to_string(each));
  EXPECT_LE(each, 2.0);
}

TEST(Crc32cTest, KnownVectorsAndTheFastOneEqualsTheTable) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::mt19937 random(3);
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(ExtendCrc32c(0x1234u, bytes), ExtendCrc32cPortable(0x1234u, bytes)) << i;
    EXPECT_EQ(ExtendCrc32c(Crc32c(bytes.substr(0, bytes.size() / 2)), bytes.substr(bytes.size() / 2)), Crc32c(bytes));
    bytes.push_back(static_cast<char>(random()));
  }
}

TEST(ByteIoTest, NeverReadsTooFarAndRemembersTheFailure) {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Put(uint32_t{7});
  out.PutSigned(-3);
  out.PutVarint(UINT64_MAX);
  out.PutString("text");
  ByteReader in(bytes);
  EXPECT_EQ(in.Get<uint32_t>(), 7u);
  EXPECT_EQ(in.GetSigned(), -3);
  EXPECT_EQ(in.GetVarint(), UINT64_MAX);
  EXPECT_EQ(in.GetString(), "text");
  EXPECT_TRUE(in.done());
  EXPECT_EQ(in.Get<uint8_t>(), 0);
  EXPECT_FALSE(in.ok());
  ByteReader count(std::string_view("\xff\xff\x03", 3));
  EXPECT_EQ(count.GetCount(1), 0u);
  EXPECT_FALSE(count.ok());
}

}  // namespace
}  // namespace bellwether::server

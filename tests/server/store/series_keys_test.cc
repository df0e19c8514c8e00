// Goal: keys of series tell signals apart by 16 bits, and those of 8 bits read as before.
// Method: keys taken apart, and one built as earlier servers did.

#include "server/store/series_keys.h"

#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

TEST(SeriesKeysTest, GivesBackWhatItWasMadeOf) {
  for (const uint16_t signal : {0, 1, 255, 256, 261, 65535}) {
    for (const uint32_t index : {0u, 7u, (1u << 24) - 1}) {
      const std::string key = SeriesRowKey('s', {.run = 3, .signal = signal, .index = index}, 9, -4);
      ASSERT_EQ(key.size(), kSeriesKeyBytes);
      EXPECT_EQ(KeySignal(key), signal);
      EXPECT_EQ(KeyIndex(key), index);
      EXPECT_EQ(KeyAttempt(key), 9u);
      EXPECT_EQ(KeyFirstStep(key), -4);
      EXPECT_EQ(key.substr(0, kSeriesPrefixBytes), SeriesPrefix('s', {.run = 3, .signal = signal, .index = index}));
    }
  }
}

TEST(SeriesKeysTest, NoSignalIsAPrefixOfAnother) {
  const std::string of_5 = SignalKey('w', 3, 5).key();
  EXPECT_FALSE(SeriesRowKey('w', {.run = 3, .signal = 261, .index = 0}, 1, 0).starts_with(of_5));
  EXPECT_TRUE(SeriesRowKey('w', {.run = 3, .signal = 5, .index = 1 << 20}, 1, 0).starts_with(of_5));
}

TEST(SeriesKeysTest, KeysOfEarlierServersReadTheSame) {
  const std::string key = KeyBuilder('m').U64(3).U8(184).U32(77).U32(2).I64(500).key();
  EXPECT_EQ(key, SeriesRowKey('m', {.run = 3, .signal = 184, .index = 77}, 2, 500));
}

}  // namespace
}  // namespace bellwether::server

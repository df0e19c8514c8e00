// Goal: the checksum of a range is the same whichever way it is made.
// Method: ranges of random bytes, in any order, against one pass over each.
#include "server/store/crc_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "bellwether/crc32c.h"

namespace bellwether::server {
namespace {

TEST(CrcRangesTest, AnyRangeHasTheChecksumOfItsBytes) {
  std::mt19937 random(20261123);
  std::string bytes((1 << 20) + 13, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  const std::string_view view(bytes);
  CrcRanges ranges(view);
  const auto check = [&](uint32_t before, size_t begin, size_t end) {
    EXPECT_EQ(ranges.Extend(before, begin, end), ExtendCrc32c(before, view.substr(begin, end - begin)))
        << begin << " to " << end;
  };
  check(0, 0, 0);
  check(7, 0, 1);
  check(7, 63, 64);
  check(7, 64, 64);
  for (int i = 0; i < 300; ++i) {
    const size_t begin = random() % bytes.size();
    check(static_cast<uint32_t>(random()), begin, begin + random() % (bytes.size() - begin + 1));
    check(static_cast<uint32_t>(random()), begin, std::min(begin + random() % 300, bytes.size()));
  }
  check(1, 0, bytes.size());
  check(1, bytes.size(), bytes.size());
}

TEST(CrcRangesTest, ARangeMayBeLongerThanThreeBytesCount) {
  const std::string zeros((17 << 20) + 5, '\0');
  CrcRanges ranges(zeros);
  EXPECT_EQ(ranges.Extend(9, 3, zeros.size()), ExtendCrc32c(9, std::string_view(zeros).substr(3)));
}

}  // namespace
}  // namespace bellwether::server

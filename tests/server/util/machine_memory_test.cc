// Goal: the memory that a server counts on is the machine's, or what its control groups leave it.
// Method: /proc and /sys as files of the test's own; what is freed is read from the real ones.

#include "server/util/machine_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/base/config.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

class MachineMemoryTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  int64_t Bytes() const { return MemoryBytesWithinGroups(kMachine, root_.path()); }

  static constexpr int64_t kMachine = 16'000 * 1024;
  TempDirectory root_;
};

TEST_F(MachineMemoryTest, WithoutCgroupsTheMachineMemoryCounts) { EXPECT_EQ(Bytes(), kMachine); }

TEST_F(MachineMemoryTest, AGroupThatMayHaveAllLimitsNothing) {
  Write("/proc/self/cgroup", "0::/system.slice/bellwetherd.service\n");
  Write("/sys/fs/cgroup/system.slice/bellwetherd.service/memory.max", "max\n");
  EXPECT_EQ(Bytes(), kMachine);
}

TEST_F(MachineMemoryTest, TheSmallestOfTheGroupsAroundItCounts) {
  Write("/proc/self/cgroup", "0::/system.slice/bellwetherd.service\n");
  Write("/sys/fs/cgroup/system.slice/bellwetherd.service/memory.max", "8000000\n");
  Write("/sys/fs/cgroup/system.slice/memory.max", "7000000\n");
  EXPECT_EQ(Bytes(), 7'000'000);
}

TEST_F(MachineMemoryTest, AContainerSeesItsGroupAsTheRoot) {
  Write("/proc/self/cgroup", "0::/../outside\n");
  Write("/sys/fs/cgroup/memory.max", "6000000\n");
  EXPECT_EQ(Bytes(), 6'000'000);
}

TEST_F(MachineMemoryTest, GroupsOfVersionOneCountToo) {
  Write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/docker/b\n0::/\n");
  Write("/sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "5000000\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Bytes(), 5'000'000);
}

TEST(MachineMemory, MachineMemoryIsPositive) { EXPECT_GT(MachineMemoryBytes(), 64 << 20); }

TEST(ReturnFreedMemoryTest, MemoryFreedBetweenWhatLivesIsReturned) {
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's memory is its own";
#endif
  constexpr size_t kBlocks = 2000, kBlockBytes = 32 << 10;
  std::vector<std::string> freed, living;
  for (size_t i = 0; i < kBlocks; ++i) {
    freed.emplace_back(kBlockBytes, 'x');
    living.emplace_back(64, 'y');
  }
  freed.clear();
  const int64_t before = ResidentBytes();
  ReturnFreedMemory();
  EXPECT_LT(ResidentBytes(), before - static_cast<int64_t>(kBlocks * kBlockBytes / 2));
  EXPECT_EQ(living.back().size(), 64u);
}

}  // namespace
}  // namespace bellwether::server

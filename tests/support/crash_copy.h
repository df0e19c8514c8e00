// crash_copy.h: a folder as a crash at this moment would leave it.

#ifndef BELLWETHER_TESTS_SUPPORT_CRASH_COPY_H_
#define BELLWETHER_TESTS_SUPPORT_CRASH_COPY_H_

#include <cstdint>
#include <filesystem>
#include <map>
#include <system_error>

namespace bellwether {

// Copies the files of `from`, which others may be writing and deleting, to the
// new folder `to`.  A copy takes time and a crash takes none: one during which
// anything changed is thrown away and made again.
inline void CrashCopy(const std::filesystem::path& from, const std::filesystem::path& to) {
  const auto look = [&from] {
    std::map<std::filesystem::path, uintmax_t> sizes;
    for (const auto& entry : std::filesystem::directory_iterator(from)) {
      std::error_code vanished;
      sizes[entry.path().filename()] = entry.file_size(vanished);
    }
    return sizes;
  };
  for (;;) {
    const auto before = look();
    std::filesystem::create_directory(to);
    for (const auto& [name, size] : before) {
      std::error_code vanished;
      std::filesystem::copy_file(from / name, to / name, vanished);
    }
    if (look() == before) return;
    std::filesystem::remove_all(to);
  }
}

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_SUPPORT_CRASH_COPY_H_

// temp_directory.h: a directory that goes when the test does.

#ifndef BELLWETHER_TESTS_SUPPORT_TEMP_DIRECTORY_H_
#define BELLWETHER_TESTS_SUPPORT_TEMP_DIRECTORY_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace bellwether {

class TempDirectory {
 public:
  TempDirectory() : path_(::testing::TempDir() + "/bellwether-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) throw std::system_error(errno, std::generic_category(), path_);
  }
  ~TempDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_SUPPORT_TEMP_DIRECTORY_H_

// Any text is a configuration or a list of findings; after findings nothing has
// changed.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "server/app/config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  static const std::string path = "/tmp/config_fuzz-" + std::to_string(getpid()) + ".yml";
  static const int cleaned = std::atexit([] { std::remove(path.c_str()); });
  (void)cleaned;
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  ServerOptions options;
  const auto before = DescribeOptions(options);
  const absl::Status read = ReadConfig(path, &options).status();
  FUZZ_CHECK(read.ok() || !read.message().empty());
  FUZZ_CHECK(read.ok() || DescribeOptions(options) == before);
  return 0;
}

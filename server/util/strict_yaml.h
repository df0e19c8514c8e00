// strict_yaml.h: reads YAML that people write, and names each fault with its
// place.
//
// Every finding is `file:line:column: field = value: what is legal`.  All of
// them are collected, so that one look at a file is enough.  A key that stands
// twice, an unknown key, a second document and text that is not UTF-8 are
// findings, never guesses.  So is a number in quotes, out of its range, not
// decimal, or with a zero in front.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_UTIL_STRICT_YAML_H_
#define BELLWETHER_SERVER_UTIL_STRICT_YAML_H_

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace bellwether::server {

class StrictYaml {
 public:
  // `file` is what findings call it.
  explicit StrictYaml(std::string file) : file_(std::move(file)) {}

  // The text's only document; an empty one is an empty map.  nullopt: it does
  // not parse, is no UTF-8, is longer than `bytes_max`, or holds a second document.
  std::optional<YAML::Node> Load(std::string_view text, size_t bytes_max);

  void Report(const YAML::Mark& at, std::string_view what);
  void Report(const YAML::Node& at, std::string_view what) { Report(at.Mark(), what); }

  // Calls `visit` for each key of a map that stands once.  `path` is the map's
  // own name, "" for the file.  False: it is no map.
  using Visit = std::function<void(const std::string& key, const YAML::Node& key_node, const YAML::Node& value)>;
  bool ForEach(const YAML::Node& map, const std::string& path, const Visit& visit);
  // As a list of at most `count_max`; an empty one if it is no list.
  std::vector<YAML::Node> List(const YAML::Node& node, const std::string& path, size_t count_max);

  // Each leaves `*out` alone and returns false on a finding.  Both ends of a
  // range are legal; NaN and infinities are not.
  bool Number(const YAML::Node& node, const std::string& path, double low, double high, double* out);
  bool Integer(const YAML::Node& node, const std::string& path, int64_t low, int64_t high, int64_t* out);
  bool Flag(const YAML::Node& node, const std::string& path, bool* out);
  // 1..bytes_max bytes without control characters.
  bool Text(const YAML::Node& node, const std::string& path, size_t bytes_max, std::string* out);
  bool Choice(const YAML::Node& node, const std::string& path, std::span<const char* const> words, size_t* out);

  bool clean() const { return findings_.empty() && more_ == 0; }
  // INVALID_ARGUMENT with a line per finding, or OK.
  absl::Status status() const;

 private:
  const std::string file_;
  std::vector<std::string> findings_;
  size_t more_ = 0;  // Findings beyond the limit, counted only.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_STRICT_YAML_H_

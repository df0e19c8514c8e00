// Whatever lies in a spool's folder: what is given out are whole frames with the
// right checksums, in rising order, each a stretch of one of the files; a second
// look finds the same, the spool goes on behind it, and what is freed is gone.
// The files beside the segments are read whole or not at all.
//
// The input is up to which ordinal the sender had committed, the number of files,
// and for each what it is, its name, its bytes or records, and damage to them.

#include <google/protobuf/stubs/logging.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bellwether/crc32c.h"
#include "client_lib/sender/body_codec.h"
#include "client_lib/sender/spool.h"
#include "client_lib/sender/spool_folder.h"
#include "tests/fuzz/fuzz.h"

namespace bellwether::client {
namespace {

constexpr char kMagic[] = "BWspl\r\n\1";

struct Kept {
  uint64_t ordinal, ring_position, frames_admitted;
  bool last_part;
  std::string body;
  bool operator==(const Kept& other) const = default;
};

// As spool.h says that it lies in a file.
std::string Record(const Kept& kept, const std::string& stored, bool packed) {
  const auto body_bytes = static_cast<uint32_t>(stored.size());
  const uint64_t words[] = {(kept.last_part ? uint64_t{1} : 0) | (packed ? uint64_t{2} : 0), kept.ordinal,
                            kept.ring_position, kept.frames_admitted};
  std::string checked(reinterpret_cast<const char*>(&body_bytes), sizeof(body_bytes));
  checked.append(reinterpret_cast<const char*>(words), sizeof(words));
  checked += stored;
  const uint32_t crc = Crc32c(checked);
  return std::string(reinterpret_cast<const char*>(&crc), sizeof(crc)) + checked;
}

// How long the record at `at` is if it is whole and this one; 0 = it is not.
size_t RecordBytes(const std::string& bytes, size_t at, const Kept& kept, bool with_body) {
  uint32_t body_bytes = 0;
  if (at > bytes.size() || bytes.size() - at < 40) return 0;
  std::memcpy(&body_bytes, bytes.data() + at + 4, sizeof(body_bytes));
  if (body_bytes > bytes.size() - at - 40) return 0;
  const std::string stored = bytes.substr(at + 40, body_bytes);
  for (const bool packed : {false, true}) {
    if (bytes.compare(at, 40 + body_bytes, Record(kept, stored, packed)) != 0) continue;
    static BodyCodec codec;
    std::string body = stored;
    if (packed && !codec.Unpack(stored, size_t{2} << 20, &body)) return 0;
    return !with_body || body == kept.body ? 40 + body_bytes : 0;
  }
  return 0;
}

// The one folder of this process, in memory where there is one, and the parent
// that its sender was given.
class Folder {
 public:
  Folder() {
    google::protobuf::SetLogHandler(nullptr);  // It says of each hello what is wrong with it.
    FUZZ_CHECK(mkdtemp(parent_.data()) != nullptr);
    std::strcpy(config_.spool_dir, parent_.c_str());
    path_ = parent_ + "/" + SpoolFolder::Prefix(config_) + "1";
  }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(parent_, error);
  }
  void Empty() const {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    FUZZ_CHECK(mkdir(path_.c_str(), 0700) == 0);
  }
  const std::string& path() const { return path_; }
  const SenderConfig& config() const { return config_; }

 private:
  std::string parent_ = (access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::filesystem::temp_directory_path().string()) +
                        "/fuzz_spool-XXXXXX";
  std::string path_;
  SenderConfig config_{};
};

std::string SegmentName(uint64_t first, const char* suffix) {
  char name[32];
  std::snprintf(name, sizeof(name), "%016llx%s", static_cast<unsigned long long>(first), suffix);
  return name;
}

std::string TakeName(FuzzInput* input, const char* suffix) {
  std::string name(input->TakeBytes(16));
  for (char& c : name) c = c == '\0' || c == '/' ? '0' : c;
  return name + suffix;
}

// Whole records in a file of the right name, mostly; some of what is packed is none of ours.
std::string TakeRecords(FuzzInput* input, uint64_t first) {
  static BodyCodec codec;
  std::string bytes(kMagic, 8);
  uint64_t ordinal = first + input->Take<uint8_t>() / 250;
  for (int records = input->Take<uint8_t>() % 12; records > 0; --records) {
    const auto how = input->Take<uint8_t>();
    std::string body(input->Take<uint8_t>(), static_cast<char>('a' + ordinal % 26));
    const bool packed = (how & 4) != 0;
    if (packed) body = (how & 8) != 0 ? input->TakeBytes(body.size()) : codec.Pack(body);
    bytes += Record({ordinal, ordinal + 1000, ordinal / 2, (how & 3) != 0, ""}, body, packed);
    ordinal += static_cast<uint64_t>(how / 16 == 15 ? -1 : 1 + how / 64);
  }
  return bytes;
}

void Damage(FuzzInput* input, std::string* bytes) {
  for (int damages = input->Take<uint8_t>() % 3; damages > 0 && !bytes->empty(); --damages) {
    const size_t at = input->Take<uint16_t>() % bytes->size();
    const auto how = input->Take<uint8_t>();
    if (how < 64) {
      bytes->resize(at);
    } else {
      (*bytes)[at] = static_cast<char>((*bytes)[at] ^ how);
    }
  }
}

// Writes the files; returns what is in them by name.
std::map<std::string, std::string> WriteFiles(FuzzInput* input, const std::string& path) {
  std::map<std::string, std::string> files;
  uint64_t first = 1;
  for (int count = input->Take<uint8_t>() % 6; count > 0; --count) {
    const auto kind = input->Take<uint8_t>();
    const char* suffix = (kind & 8) != 0 ? ".window" : ".spool";
    std::string name, bytes;
    if (kind % 8 < 5) {
      first += input->Take<uint8_t>();
      name = SegmentName(first, suffix);
      bytes = TakeRecords(input, first);
      Damage(input, &bytes);
    } else {
      name = kind % 8 == 5 ? TakeName(input, suffix) : kind % 8 == 6 ? "state" : "hello";
      bytes = input->TakeBytes(input->Take<uint16_t>() % 4096);
    }
    std::ofstream file(path + "/" + name, std::ios::binary);
    file << bytes;
    FUZZ_CHECK(file.flush().good());
    files[name] = bytes;
  }
  return files;
}

std::vector<Kept> ReadAll(Spool* spool) {
  std::vector<Kept> all;
  Spool::Cursor cursor;
  HeldMessage m;
  for (; spool->Peek(&cursor, &m); spool->Advance(&cursor))
    all.push_back({m.ordinal, m.ring_position, m.frames_admitted, m.last_part, std::string(m.body)});
  return all;
}

// Whether the parts lie one behind the other in one of the files.
bool Holds(const std::map<std::string, std::string>& files, const std::vector<Kept>& frame, bool with_body) {
  const uint64_t words[] = {frame[0].ordinal, frame[0].ring_position, frame[0].frames_admitted};
  const std::string_view fields(reinterpret_cast<const char*>(words), sizeof(words));
  for (const auto& [name, bytes] : files) {
    for (size_t found = bytes.find(fields, 16); found != std::string::npos; found = bytes.find(fields, found + 1)) {
      size_t at = found - 16;
      size_t parts = 0;
      for (size_t size = 1; parts < frame.size(); at += size, ++parts) {
        size = RecordBytes(bytes, at, frame[parts], with_body);
        if (size == 0) break;
      }
      if (parts == frame.size()) return true;
    }
  }
  return false;
}

uint64_t BytesOnDisk(const std::string& path, const std::string& suffix) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const std::string name = entry.path().filename();
    const std::string digits = name.substr(0, std::min<size_t>(16, name.size()));
    if (digits.find_first_not_of("0123456789abcdef") == std::string::npos && name == digits + suffix)
      bytes += entry.file_size();
  }
  return bytes;
}

void CheckFrames(const std::vector<Kept>& all, const std::map<std::string, std::string>& files, uint64_t ordinal_max) {
  uint64_t previous = 0;
  std::vector<Kept> frame;
  for (const Kept& kept : all) {
    FUZZ_CHECK(kept.ordinal > previous && kept.ordinal <= ordinal_max);
    previous = kept.ordinal;
    frame.push_back(kept);
    if (!kept.last_part) continue;
    FUZZ_CHECK(Holds(files, frame, /*with_body=*/true));
    frame.clear();
  }
  FUZZ_CHECK(frame.empty());
}

void CheckSpool(const Folder& folder, const std::map<std::string, std::string>& files, const std::string& suffix,
                uint64_t ordinal_max) {
  const Spool::Options options{.folder = folder.path(), .suffix = suffix, .free_bytes_min = 0, .segment_bytes = 300};
  std::vector<Kept> all;
  {
    Spool spool(options);
    FUZZ_CHECK(spool.Open(ordinal_max));
    FUZZ_CHECK(spool.bytes() == BytesOnDisk(folder.path(), suffix));
    all = ReadAll(&spool);
    CheckFrames(all, files, ordinal_max);
    FUZZ_CHECK(ReadAll(&spool) == all);
    FUZZ_CHECK(all.empty() || spool.last_ordinal() >= all.back().ordinal);
    FUZZ_CHECK(spool.last_ordinal() <= ordinal_max && spool.empty() == (spool.last_ordinal() == 0));
  }
  Spool spool(options);
  FUZZ_CHECK(spool.Open(UINT64_MAX));
  FUZZ_CHECK(ReadAll(&spool) == all);
  uint64_t last = spool.last_ordinal();
  if (last < UINT64_MAX - 2) {
    const std::string first = "one part", second = "and the other";
    FUZZ_CHECK(spool.Append({{last + 1, false, 7, 7, first}, {last + 2, true, 8, 7, second}}));
    all.push_back({last + 1, 7, 7, false, first});
    all.push_back({last + 2, 7, 8, true, second});
    FUZZ_CHECK(ReadAll(&spool) == all);
    last += 2;
  }
  HeldMessage end;
  for (size_t i = 0; i < all.size(); i += 1 + all.size() / 3) {
    spool.FindFrameEnd(all[i].ordinal, &end);
    FUZZ_CHECK(end.ordinal <= all[i].ordinal);
    FUZZ_CHECK(end.ordinal == 0 || end.ordinal + 2 > last ||
               Holds(files, {{end.ordinal, end.ring_position, end.frames_admitted, true, ""}},
                     /*with_body=*/false));
    spool.FreeUpTo(all[i].ordinal);
    const std::vector<Kept> rest = ReadAll(&spool);
    FUZZ_CHECK(rest.size() >= all.size() - i - 1 && std::equal(rest.rbegin(), rest.rend(), all.rbegin()));
  }
  spool.FreeUpTo(last);
  FUZZ_CHECK(spool.empty() && spool.bytes() == 0 && BytesOnDisk(folder.path(), suffix) == 0);
}

void CheckRest(const Folder& folder, const std::map<std::string, std::string>& files) {
  std::unique_ptr<SpoolFolder> taken;
  std::string error;
  FUZZ_CHECK(SpoolFolder::Take(folder.config(), 1, &taken, &error) == SpoolFolder::Result::kOk);
  const auto hello = taken->LoadHello();
  FUZZ_CHECK(!hello.has_value() || (files.count("hello") != 0 && hello->has_hello()));
  SenderState state;
  if (taken->LoadState(&state)) {
    const std::string& bytes = files.at("state");
    uint32_t crc = 0;
    std::memcpy(&crc, bytes.data(), sizeof(crc));
    FUZZ_CHECK(crc == Crc32c(std::string_view(bytes).substr(sizeof(crc), 60)));
  }
  SenderState again;
  FUZZ_CHECK(taken->SaveState(state) && taken->LoadState(&again));
  FUZZ_CHECK(std::memcmp(&state, &again, sizeof(state)) == 0);
  taken->Remove();
  FUZZ_CHECK(!std::filesystem::exists(folder.path()));
}

}  // namespace
}  // namespace bellwether::client

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::client;
  static const Folder folder;
  bellwether::FuzzInput input(data, size);
  folder.Empty();
  const auto committed = input.Take<uint8_t>();
  const auto files = WriteFiles(&input, folder.path());
  CheckSpool(folder, files, ".spool", committed == 0 ? UINT64_MAX : committed);
  CheckSpool(folder, files, ".window", UINT64_MAX);
  CheckRest(folder, files);
  return 0;
}

// byte_io.h: the bytes of stored records: little-endian, bounds-checked.
//
// A ByteReader never reads past its input.  After the first thing that does not
// fit every read gives zeros and ok() is false, so that a decoder reads all its
// fields and asks once.  A count that is followed by elements must be checked
// against remaining() before memory is taken for it: ReadCount() does.
//
// Not thread-safe.  A ByteReader's input must outlive it.

#ifndef BELLWETHER_SERVER_UTIL_BYTE_IO_H_
#define BELLWETHER_SERVER_UTIL_BYTE_IO_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace bellwether::server {

static_assert(std::endian::native == std::endian::little, "stored bytes are little-endian");

class ByteWriter {
 public:
  explicit ByteWriter(std::string* out) : out_(out) {}

  // Integers, enums, bool, float, double: their bytes.
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    out_->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  // 7 bits a byte, low first.
  void PutVarint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_->push_back(static_cast<char>(value | 0x80));
    out_->push_back(static_cast<char>(value));
  }
  // Small magnitudes of either sign in few bytes.
  void PutSigned(int64_t value) { PutVarint((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63)); }
  void PutString(std::string_view bytes) {
    PutVarint(bytes.size());
    out_->append(bytes);
  }

 private:
  std::string* const out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view in) : in_(in) {}

  bool ok() const { return ok_; }
  // Everything was read, and nothing was missing.
  bool done() const { return ok_ && in_.empty(); }
  size_t remaining() const { return in_.size(); }

  template <typename T>
  T Get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    if constexpr (std::is_same_v<T, bool>) {
      return Get<uint8_t>() != 0;
    } else {
      T value{};
      const std::string_view bytes = GetRaw(sizeof(T));
      if (ok_) std::memcpy(&value, bytes.data(), sizeof(T));
      return value;
    }
  }
  uint64_t GetVarint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = Get<uint8_t>();
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return ok_ ? value : 0;
    }
    ok_ = false;
    return 0;
  }
  int64_t GetSigned() {
    const uint64_t value = GetVarint();
    return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  // A number of elements of at least `bytes_each` bytes; not ok if they cannot
  // all follow.
  size_t GetCount(size_t bytes_each) {
    const uint64_t count = GetVarint();
    if (count > in_.size() / bytes_each) ok_ = false;
    return ok_ ? static_cast<size_t>(count) : 0;
  }
  std::string_view GetString() { return GetRaw(GetVarint()); }
  std::string_view GetRaw(uint64_t size) {
    if (!ok_ || size > in_.size()) {
      ok_ = false;
      in_ = {};
      return {};
    }
    const std::string_view bytes = in_.substr(0, size);
    in_.remove_prefix(size);
    return bytes;
  }

 private:
  std::string_view in_;
  bool ok_ = true;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_BYTE_IO_H_

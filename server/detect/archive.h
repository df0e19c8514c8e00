// archive.h: one description of a state serves saving and restoring it.
//
// A class with state has `template <class A> void Visit(A& a)`, which calls
// a(member) for each member in order.  Writer appends the bytes, Reader takes
// them back and refuses what does not fit.  Little endian, no padding, vectors
// with a length.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_ARCHIVE_H_
#define BELLWETHER_SERVER_DETECT_ARCHIVE_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace bellwether::server {

static_assert(std::endian::native == std::endian::little, "state is saved little endian");

template <class T>
concept PlainValue = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class StateWriter {
 public:
  static constexpr bool kReading = false;
  explicit StateWriter(std::string* out) : out_(out) {}

  template <PlainValue T>
  void operator()(const T& value) {
    out_->append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void operator()(std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    out_->append(text);
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    (*this)(static_cast<uint32_t>(values.size()));
    if constexpr (PlainValue<T>) {
      out_->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    } else {
      for (T& value : values) (*this)(value);
    }
  }
  template <class T>
  requires(!PlainValue<T>) void operator()(T& value) { value.Visit(*this); }

 private:
  std::string* out_;
};

class StateReader {
 public:
  static constexpr bool kReading = true;
  explicit StateReader(std::string_view in) : in_(in) {}

  // False once anything did not fit; what was read since is not to be used.
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && in_.empty(); }
  // What was read is not legal: as if it had not fit.
  void Refuse() { Fail(); }

  template <PlainValue T>
  void operator()(T& value) {
    if (!Take(&value, sizeof value)) value = T{};
  }
  void operator()(std::string& text) {
    uint32_t size = 0;
    (*this)(size);
    if (size > in_.size()) return Fail();
    text.assign(in_.substr(0, size));
    in_.remove_prefix(size);
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    uint32_t size = 0;
    (*this)(size);
    // An element takes at least a byte: no allocation beyond what came.
    if (size > in_.size()) return Fail();
    if constexpr (PlainValue<T>) {
      if (size * sizeof(T) > in_.size()) return Fail();
      values.resize(size);
      Take(values.data(), size * sizeof(T));
    } else {
      values.clear();
      for (uint32_t i = 0; i < size && ok_; ++i) (*this)(values.emplace_back());
    }
  }
  template <class T>
  requires(!PlainValue<T>) void operator()(T& value) { value.Visit(*this); }

 private:
  bool Take(void* to, size_t size) {
    if (!ok_ || size > in_.size()) {
      Fail();
      return false;
    }
    if (size > 0) std::memcpy(to, in_.data(), size);
    in_.remove_prefix(size);
    return true;
  }
  void Fail() {
    ok_ = false;
    in_ = {};
  }

  std::string_view in_;
  bool ok_ = true;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ARCHIVE_H_

// Goal: a .bwrun file gives back exactly what was written; one that was cut or
// damaged anywhere never gives a wrong message, never crashes, never takes more
// memory than the limit, and says what is wrong.
// Method: a small file cut at each byte and with each bit of each byte flipped,
// fed in pieces of every size; planted streams with lengths that lie.

#include "bellwether/recording.h"

#include <zstd.h>

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether {
namespace {

using ::testing::HasSubstr;

std::vector<v1::RecordedMessage> SomeMessages() {
  std::vector<v1::RecordedMessage> messages(6);
  messages[0].mutable_message()->mutable_hello()->mutable_run()->set_name("run");
  for (uint32_t i = 1; i < messages.size(); ++i) {
    messages[i].set_rank(i % 2);
    messages[i].mutable_message()->set_seq(i);
    v1::Block* block = messages[i].mutable_message()->mutable_frame()->add_blocks();
    for (uint32_t v = 0; v < 20; ++v) block->add_values(static_cast<float>(i * v));
    block->add_values(std::numeric_limits<float>::quiet_NaN());
  }
  return messages;
}

std::string Write(const std::vector<v1::RecordedMessage>& messages) {
  std::string file;
  RecordingWriter writer([&file](std::string_view bytes) {
    file += bytes;
    return true;
  });
  for (const auto& message : messages) EXPECT_TRUE(writer.Write(message));
  EXPECT_TRUE(writer.Finish());
  return file;
}

struct Outcome {
  std::vector<std::string> messages;  // Serialized: NaN compares by its bits.
  RecordingReader::Result end = RecordingReader::Result::kNeedMore;
  std::string error;
};

Outcome Read(std::string_view file, size_t piece, uint32_t message_bytes_max = 1 << 20) {
  RecordingReader reader(message_bytes_max);
  Outcome outcome;
  v1::RecordedMessage message;
  for (;;) {
    outcome.end = reader.Next(&message);
    if (outcome.end == RecordingReader::Result::kMessage) {
      outcome.messages.push_back(message.SerializeAsString());
      continue;
    }
    if (outcome.end != RecordingReader::Result::kNeedMore || file.empty()) break;
    const size_t bytes = std::min(piece, file.size());
    reader.Feed(file.substr(0, bytes));
    file.remove_prefix(bytes);
  }
  outcome.error = reader.error();
  return outcome;
}

std::vector<std::string> Serialized(const std::vector<v1::RecordedMessage>& messages) {
  std::vector<std::string> all;
  for (const auto& message : messages) all.push_back(message.SerializeAsString());
  return all;
}

bool IsPrefix(const std::vector<std::string>& some, const std::vector<std::string>& all) {
  return some.size() <= all.size() && std::equal(some.begin(), some.end(), all.begin());
}

// A file whose one zstd frame holds `plain`.
std::string FileOf(const std::string& plain) {
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 1));
  return std::string(kRecordingMagic) + packed;
}

TEST(RecordingTest, GivesBackWhatWasWrittenInPiecesOfAnySize) {
  const auto messages = SomeMessages();
  const std::string file = Write(messages);
  for (size_t piece = 1; piece <= file.size(); ++piece) {
    const Outcome outcome = Read(file, piece);
    ASSERT_EQ(outcome.end, RecordingReader::Result::kEnd) << outcome.error;
    ASSERT_EQ(outcome.messages, Serialized(messages));
  }
}

TEST(RecordingTest, BytesBehindItsEndAreAnError) {
  const std::string file = Write(SomeMessages());
  for (const std::string& more : {std::string(1, '\0'), std::string("more"), file}) {
    for (const size_t piece : {size_t{1}, file.size(), file.size() + 1, file.size() + more.size()}) {
      const Outcome outcome = Read(file + more, piece);
      EXPECT_EQ(outcome.messages, Serialized(SomeMessages()));
      // A reader that is asked between the pieces has seen the end by then.
      if (piece <= file.size() && file.size() % piece == 0) continue;
      EXPECT_EQ(outcome.end, RecordingReader::Result::kError) << piece;
      EXPECT_THAT(outcome.error, HasSubstr("bytes follow its end"));
    }
  }
  RecordingReader reader;
  v1::RecordedMessage message;
  reader.Feed(file);
  while (reader.Next(&message) == RecordingReader::Result::kMessage) {
  }
  EXPECT_EQ(reader.Next(&message), RecordingReader::Result::kEnd);
  reader.Feed("x");
  EXPECT_EQ(reader.Next(&message), RecordingReader::Result::kError);
}

TEST(RecordingTest, EmptyRecordingEnds) { EXPECT_EQ(Read(Write({}), 1 << 20).end, RecordingReader::Result::kEnd); }

TEST(RecordingTest, TruncatedFileGivesAPrefixWithoutEnd) {
  const auto all = Serialized(SomeMessages());
  const std::string file = Write(SomeMessages());
  for (size_t length = 0; length < file.size(); ++length) {
    const Outcome outcome = Read(std::string_view(file).substr(0, length), 7);
    ASSERT_NE(outcome.end, RecordingReader::Result::kEnd) << length;
    ASSERT_TRUE(IsPrefix(outcome.messages, all)) << length;
  }
}

TEST(RecordingTest, FlushedMessagesAreReadableAfterWriterDies) {
  std::string file;
  RecordingWriter writer([&file](std::string_view bytes) {
    file += bytes;
    return true;
  });
  const auto messages = SomeMessages();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(writer.Write(messages[i]));
  ASSERT_TRUE(writer.Flush());
  const std::string at_death = file;
  ASSERT_TRUE(writer.Write(messages[3]));
  const Outcome outcome = Read(at_death, 16);
  EXPECT_EQ(outcome.messages.size(), 3);
  EXPECT_EQ(outcome.end, RecordingReader::Result::kNeedMore);
}

TEST(RecordingTest, NoFlippedBitPassesUnseen) {
  const auto all = Serialized(SomeMessages());
  const std::string file = Write(SomeMessages());
  int unseen = 0;
  for (size_t at = 0; at < file.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = file;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      const Outcome outcome = Read(damaged, 1 << 20);
      // Either it is noticed, or (bits of the zstd header that mean nothing
      // here) everything is right all the same.
      if (outcome.end == RecordingReader::Result::kEnd && outcome.messages != all) ++unseen;
    }
  }
  EXPECT_EQ(unseen, 0);
}

TEST(RecordingTest, OtherFilesAndVersionsAreNamed) {
  std::string file = Write(SomeMessages());
  file[7] = 2;
  EXPECT_THAT(Read(file, 100).error, HasSubstr("version"));
  EXPECT_THAT(Read("PK\3\4 something else", 100).error, HasSubstr("not a .bwrun file"));
}

TEST(RecordingTest, MessageAtLimitIsReadAndOneByteMoreRefused) {
  v1::RecordedMessage message;
  message.mutable_message()->mutable_bye()->set_detail(std::string(1000, 'x'));
  const auto size = static_cast<uint32_t>(message.ByteSizeLong());
  const std::string file = Write({message});
  EXPECT_EQ(Read(file, 64, size).end, RecordingReader::Result::kEnd);
  const Outcome outcome = Read(file, 64, size - 1);
  EXPECT_EQ(outcome.end, RecordingReader::Result::kError);
  EXPECT_THAT(outcome.error, HasSubstr(std::to_string(size) + " bytes"));
}

TEST(RecordingTest, WrongLengthsAreErrors) {
  EXPECT_THAT(Read(FileOf("\xff\xff\xff\xff\x0f"), 64).error, HasSubstr("4294967295 bytes"));
  EXPECT_THAT(Read(FileOf(std::string(12, '\xff')), 64).error, HasSubstr("length"));
  EXPECT_THAT(Read(FileOf(std::string("\x05") + "ab"), 64).error, HasSubstr("ends within a message"));
  EXPECT_THAT(Read(FileOf(std::string("\x02\xff\xff")), 64).error, HasSubstr("cannot be parsed"));
}

TEST(RecordingTest, ABombDoesNotGrowTheReader) {
  // 64 MiB of zeroes are 65,536 empty messages a MiB: read one by one.
  const std::string file = FileOf(std::string(64 << 20, '\0'));
  EXPECT_LT(file.size(), 64 << 10);
  RecordingReader reader;
  reader.Feed(file);
  v1::RecordedMessage message;
  uint64_t count = 0;
  while (reader.Next(&message) == RecordingReader::Result::kMessage) ++count;
  EXPECT_EQ(count, 64 << 20);
}

TEST(RecordingTest, AFullDiskFailsTheWriterForGood) {
  size_t room = 100;
  RecordingWriter writer([&room](std::string_view bytes) {
    if (bytes.size() > room) return false;
    room -= bytes.size();
    return true;
  });
  v1::RecordedMessage message;  // That zstd cannot make small.
  uint64_t random = 1;
  for (int i = 0; i < 1000; ++i) {
    random = random * 6364136223846793005 + 1442695040888963407;
    message.mutable_message()->mutable_hello()->mutable_run()->mutable_uuid()->push_back(
        static_cast<char>(random >> 56));
  }
  EXPECT_TRUE(writer.Write(message));
  EXPECT_FALSE(writer.Flush());
  EXPECT_FALSE(writer.Write(message));
  EXPECT_FALSE(writer.Finish());
}

}  // namespace
}  // namespace bellwether

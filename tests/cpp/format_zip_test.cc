#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "format/torch/zip.h"

namespace torch_ckpt {
namespace {

using namespace std::string_literals;

template <class T>
std::string Raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// One entry "a/b" of four bytes, and what may be wrong with it.
struct Forged {
  uint16_t flags = 0, method = 0;
  bool large = false;      // zip64 throughout
  uint64_t content = 4;    // as the directory says
  uint64_t header_at = 0;  // as the directory says
  uint16_t entries = 1;    // as the end says
  std::string comment = {};
};

std::string Archive(const Forged& f = {}) {
  const std::string name = "a/b";
  std::string out = "PK\x03\x04" + Raw<uint16_t>(45) + Raw(f.flags) +
                    Raw(f.method) + std::string(16, '\0') + Raw<uint16_t>(3) +
                    Raw<uint16_t>(5) + name + "extra" + "DATA";
  const uint64_t directory = out.size();
  const auto narrow = [&](uint64_t value) {
    return Raw(f.large ? UINT32_MAX : static_cast<uint32_t>(value));
  };
  const std::string extra = f.large ? Raw<uint16_t>(7) + Raw<uint16_t>(1) +
                                          "x" + Raw<uint16_t>(1) +
                                          Raw<uint16_t>(24) + Raw(f.content) +
                                          Raw(f.content) + Raw(f.header_at)
                                    : "";
  out += "PK\x01\x02" + Raw<uint16_t>(45) + Raw<uint16_t>(45) + Raw(f.flags) +
         Raw(f.method) + Raw<uint32_t>(0) + Raw<uint32_t>(0x1234) +
         narrow(f.content) + narrow(f.content) + Raw<uint16_t>(3) +
         Raw(static_cast<uint16_t>(extra.size())) + Raw<uint16_t>(0) +
         std::string(8, '\0') + narrow(f.header_at) + name + extra;
  const uint64_t bytes = out.size() - directory;
  if (f.large) {
    const uint64_t end = out.size();
    out += "PK\x06\x06" + Raw<uint64_t>(44) + Raw<uint32_t>(0) +
           Raw<uint64_t>(0) + Raw<uint64_t>(1) + Raw<uint64_t>(1) + Raw(bytes) +
           Raw(directory);
    out += "PK\x06\x07" + Raw<uint32_t>(0) + Raw(end) + Raw<uint32_t>(1);
  }
  return out + "PK\x05\x06" + Raw<uint32_t>(0) + Raw(f.entries) +
         Raw(f.entries) + narrow(bytes) + narrow(directory) +
         Raw(static_cast<uint16_t>(f.comment.size())) + f.comment;
}

// What ZipContentBegin says of the first entry.
Result<std::string> Content(const std::string& archive) {
  const ByteSpan bytes = AsBytes(archive);
  TC_ASSIGN_OR_RETURN(
      const ZipDirectory directory,
      FindZipDirectory(
          bytes.last(std::min(bytes.size(), kZipTail + kMaxZipComment)),
          bytes.size()));
  TC_ASSIGN_OR_RETURN(
      const std::vector<ZipEntry> entries,
      ParseZipDirectory(bytes.subspan(directory.begin, directory.bytes),
                        directory));
  if (entries.size() != 1 || entries[0].name != "a/b") {
    return Internal("other entries");
  }
  TC_ASSIGN_OR_RETURN(
      const uint64_t begin,
      ZipContentBegin(bytes.subspan(entries[0].header, kZipLocalHeader),
                      entries[0], directory));
  return archive.substr(begin, entries[0].bytes);
}

ErrorKind KindOf(const Forged& forged) {
  return Content(Archive(forged)).status().kind();
}

TEST(ZipTest, FindsContent) {
  for (const bool large : {false, true}) {
    const auto content = Content(Archive({.large = large}));
    ASSERT_TRUE(content.ok()) << content.status().ToString();
    EXPECT_EQ(*content, "DATA");
  }
}

TEST(ZipTest, RefusesWhatTorchDoesNotWrite) {
  EXPECT_EQ(KindOf({.flags = 1}), ErrorKind::kUnsupported);
  EXPECT_EQ(KindOf({.method = 8}), ErrorKind::kUnsupported);
  for (const std::string& comment : {"hello"s, std::string(0xffff, 'x')}) {
    EXPECT_EQ(KindOf({.comment = comment}), ErrorKind::kOk);
    EXPECT_EQ(KindOf({.large = true, .comment = comment}), ErrorKind::kOk);
    const std::string archive = Archive({.comment = comment});
    EXPECT_EQ(Content(archive.substr(0, archive.size() - 1)).status().kind(),
              ErrorKind::kCorrupt);
  }
  // A data descriptor says nothing that the directory does not.
  EXPECT_EQ(KindOf({.flags = 8}), ErrorKind::kOk);
}

TEST(ZipTest, NothingReachesOutside) {
  for (const bool large : {false, true}) {
    for (const uint64_t content : {uint64_t{5}, uint64_t{1} << 31}) {
      EXPECT_EQ(KindOf({.large = large, .content = content}),
                ErrorKind::kCorrupt);
    }
    EXPECT_EQ(KindOf({.large = large, .header_at = 1}), ErrorKind::kCorrupt);
  }
  EXPECT_EQ(KindOf({.large = true, .content = UINT64_MAX}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(KindOf({.large = true, .header_at = UINT64_MAX - 2}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(KindOf({.entries = 0}), ErrorKind::kCorrupt);
  EXPECT_EQ(KindOf({.entries = 2}), ErrorKind::kCorrupt);
}

TEST(ZipTest, EveryPrefixIsAnErrorAndNoBitCrashes) {
  for (const bool large : {false, true}) {
    const std::string archive = Archive({.large = large});
    for (size_t size = 0; size < archive.size(); ++size) {
      EXPECT_FALSE(Content(archive.substr(0, size)).ok()) << size;
    }
    for (size_t bit = 0; bit < 8 * archive.size(); ++bit) {
      std::string flipped = archive;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      const auto content = Content(flipped);
      if (!content.ok()) continue;
      EXPECT_LE(content->size(), archive.size());
    }
  }
}

}  // namespace
}  // namespace torch_ckpt

// What is said of fields that are missing, unknown or of another type.
#include <gtest/gtest.h>

#include "json/fields.h"
#include "json/options.h"

namespace torch_ckpt {
namespace {

constexpr Field kFields[] = {
    {"path", FieldType::kString},  {"workers", FieldType::kInteger},
    {"sync", FieldType::kBool},    {"offsets", FieldType::kList},
    {"files", FieldType::kObject}, {"names", FieldType::kNames}};

Status Check(const char* text) {
  return CheckFields(Json::parse(text), "the plan", kFields);
}

TEST(FieldsTest, KnownFieldsOfTheirTypes) {
  EXPECT_TRUE(Check("{}").ok());
  EXPECT_TRUE(Check(R"({"path": "x", "workers": -1, "sync": false,
      "offsets": [], "files": {}, "names": "a\nb"})")
                  .ok());
  EXPECT_TRUE(Check(R"({"path": null, "names": ["a"]})").ok());
}

TEST(FieldsTest, ErrorsNameTheField) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"pth": 1})",
       "the plan has no 'pth'; it has 'path', 'workers', "
       "'sync', 'offsets', 'files', 'names'"},
      {R"({"path": 1})", "'path' is not a string"},
      {R"({"workers": 1.0})", "'workers' is not an integer"},
      {R"({"sync": 1})", "'sync' is not true or false"},
      {R"({"offsets": {}})", "'offsets' is not a list"},
      {R"({"files": []})", "'files' is not an object"},
      {R"({"names": {}})",
       "'names' is not a list of names, or one text with a name a line"}};
  for (const auto& [text, message] : cases) {
    const Status status = Check(text);
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(status.message(), message);
  }
}

TEST(FieldsTest, GettersNameTheField) {
  const Json object = Json::parse(
      R"({"n": "x", "shapes": [[1], null, ["a"]], "names": ["a", 2]})");
  EXPECT_EQ(GetInt(object, "n", 3).status().message(), "'n' is not an integer");
  EXPECT_EQ(GetInt(object, "m").status().message(),
            "'m' is missing; it is an integer");
  EXPECT_EQ(GetString(object, "path").status().message(),
            "'path' is missing; it is a string");
  EXPECT_EQ(GetDimsAt(object, "shapes", 2).status().message(),
            "'shapes', entry 2: a shape holds integers only");
  EXPECT_EQ(GetDimsAt(object, "shapes", 3).status().message(),
            "'shapes' is too short");
  EXPECT_EQ(GetNames(object, "names").status().message(),
            "'names' is not a list of names, or one text with a name a line");
}

TEST(FieldsTest, UrlsAreNoPaths) {
  for (const char* path : {"/a:/b", "a/b:/c", "C3PO", ":/x", "1s:/x", ""}) {
    EXPECT_EQ(GetPath({{"path", path}}, "path").value(), path);
  }
  for (const char* path : {"s3://bucket/c", "gs+x.y-z:/c", "h:/"}) {
    EXPECT_EQ(GetPath({{"path", path}}, "path").status().message(),
              "'path' is a URL, " + std::string(path) +
                  ": mount it or copy the checkpoint");
  }
}

TEST(FieldsTest, NestingIsBounded) {
  const auto nested = [](size_t depth) {
    return "{\"a\":" + std::string(depth - 1, '[') + "\"[[\\\"[[\"" +
           std::string(depth - 1, ']') + "}";
  };
  EXPECT_TRUE(ParseObject(nested(64), "plan").ok());
  EXPECT_EQ(ParseObject(nested(65), "plan").status().message(),
            "the plan is nested deeper than 64 levels");
  EXPECT_EQ(ParseObject(std::string(1 << 20, '['), "plan").status().message(),
            "the plan is nested deeper than 64 levels");
  std::string flat = "{\"a\":[";
  for (int i = 0; i < 100; ++i) flat += "[],";
  EXPECT_TRUE(ParseObject(flat + "{}]}", "plan").ok());
}

TEST(FieldsTest, IntegersThatAreTooLarge) {
  EXPECT_EQ(GetInt({{"n", INT64_MAX}}, "n").value(), INT64_MAX);
  EXPECT_EQ(GetInt({{"n", uint64_t{1} << 63}}, "n").status().message(),
            "'n' is too large");
}

TEST(FieldsTest, WorkersAreWithinBounds) {
  EXPECT_EQ(WorkersOf(Json::object()), kDefaultWorkers);
  EXPECT_EQ(WorkersOf({{"workers", -3}}), 1);
  EXPECT_EQ(WorkersOf({{"workers", int64_t{1} << 40}}), kMaxWorkers);
}

}  // namespace
}  // namespace torch_ckpt

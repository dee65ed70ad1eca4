// A checkpoint of one process, from memory to the commit in one call.
#include "engine/save/save_job.h"
#include "engine_test_util.h"
#include "fake_cuda.h"

namespace torch_ckpt {
namespace {

class SaveJobTest : public EngineTest {
 protected:
  static void SetUpTestSuite() { FakeCuda::UseForProcess(); }

  void Add(const std::string& name, const Array& array) {
    SourceTensor source = BytesSource(array.bytes);
    plan_.tensors.push_back({name, array.dtype, array.shape,
                             Dims::Filled(array.shape.size(), 0), array.shape,
                             sources_.size()});
    sources_.push_back(source);
    expected_[name] = array.bytes;
  }

  Result<Manifest> Save() {
    plan_.path = Path("c");
    Job job;
    TC_ASSIGN_OR_RETURN(SavedCheckpoint saved,
                        RunSaveJob(plan_, sources_, &job));
    warnings_ = std::move(saved.warnings);
    return std::move(saved.manifest);
  }

  bool HasFile(const std::string& name) {
    const std::vector<std::string> names = Names(Path("c"));
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  void ExpectSaved() {
    auto found = ReadAll(Path("c"));
    ASSERT_OK(found.status());
    EXPECT_EQ(found->size(), expected_.size());
    for (const auto& [name, bytes] : expected_) {
      EXPECT_TRUE((*found)[name] == bytes) << name;
    }
  }

  FakeCuda fake_;
  const Array large_ = MakeArray(Dtype::kF32, {1300, 1001}, 1);
  const Array small_ = MakeArray(Dtype::kBF16, {7, 3}, 2);
  const Array scalar_ = MakeArray(Dtype::kI64, {}, 3);
  SavePlan plan_;
  std::vector<SourceTensor> sources_;
  std::map<std::string, std::string> expected_;
  std::vector<std::string> warnings_;  // of the last save
};

TEST_F(SaveJobTest, OneFileWithoutAnIndex) {
  plan_.naming.number_single = false;
  Add("large", large_);
  Add("small", small_);
  Add("scalar", scalar_);
  const auto manifest = Save();
  ASSERT_OK(manifest.status());
  EXPECT_EQ(manifest->world_size, 1);
  EXPECT_EQ(Names(Path("")), std::vector<std::string>{"c"});  // no staging
  EXPECT_TRUE(HasFile("model.safetensors"));
  EXPECT_EQ(Names(Path("c")).size(), 3u);  // and the manifest and catalog
  ExpectSaved();
}

TEST_F(SaveJobTest, SeveralFilesAndThenFewer) {
  plan_.naming.number_single = false;
  plan_.rule.max_bytes = 1000;
  Add("large", large_);
  Add("small", small_);
  ASSERT_OK(Save().status());
  EXPECT_TRUE(HasFile("model-00002-of-00002.safetensors"));
  EXPECT_TRUE(HasFile("model.safetensors.index.json"));
  ExpectSaved();
  plan_.rule = {};
  ASSERT_OK(Save().status());
  EXPECT_FALSE(HasFile("model.safetensors.index.json"));
  ExpectSaved();
}

TEST_F(SaveJobTest, NothingIsAnEmptyCheckpoint) {
  ASSERT_OK(Save().status());
  ExpectSaved();
}

TEST_F(SaveJobTest, WhatIsRefusedLeavesWhatWasThere) {
  Add("small", small_);
  ASSERT_OK(Save().status());
  plan_.overwrite = false;
  EXPECT_EQ(Save().status().kind(), ErrorKind::kConflict);
  plan_.overwrite = true;
  plan_.tensors.push_back(plan_.tensors[0]);
  Status status = Save().status();
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(status.tensor(), "small");
  plan_.tensors[1].name = "other";
  plan_.tensors[1].shape = plan_.tensors[1].global_shape = {8, 3};
  status = Save().status();
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(status.tensor(), "other");
  ExpectSaved();
  EXPECT_EQ(Names(Path("c")).size(), 4u);  // nothing staged
}

TEST_F(SaveJobTest, WaitsForTheDevicesOfItsTensors) {
  Add("small", small_);
  ASSERT_OK(Save().status());
  EXPECT_EQ(fake_.Calls("cuCtxSynchronize"), 0);
  for (const auto& [name, array] :
       {std::pair("x", &large_), std::pair("y", &scalar_)}) {
    Add(name, *array);
    sources_.back().data = FakeCuda::OnDevice(array->bytes.data());
    sources_.back().device = 1;
  }
  ASSERT_OK(Save().status());
  EXPECT_EQ(fake_.Calls("cuCtxSynchronize"), 1);
  ExpectSaved();
  fake_.Fail("cuCtxSynchronize", 2, 700);
  EXPECT_EQ(Save().status().kind(), ErrorKind::kIo);
  ExpectSaved();
}

}  // namespace
}  // namespace torch_ckpt

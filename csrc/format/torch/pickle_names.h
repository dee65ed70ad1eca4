// The names that pickles of checkpoints may say: a static list. A name stands
// for what the pickle means by it, whichever module it was in at the time;
// nothing is imported, looked up or called.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "format/dtype.h"

namespace torch_ckpt {

enum class PickleName : uint8_t {
  kUnknown,  // on no list
  // torch
  kDtype,       // PickleValue::dtype says which
  kOtherDtype,  // one that safetensors has no name for
  kStorage,     // torch.FloatStorage; PickleValue::dtype says of what
  kUntypedStorage,
  kSize,
  kDevice,
  kGenerator,
  kLayout,
  kRebuildTensor,    // of a storage that has a dtype
  kRebuildTensorV3,  // of one that has none
  kRebuildParameter,
  kRebuildParameterWithState,
  kRebuildFromType,
  kRebuildWrapperSubclass,
  kTensor,
  kParameter,
  // torch.distributed.tensor
  kDTensor,
  kDTensorSpec,
  kTensorMeta,
  kShardOrderEntry,
  kShard,
  kStridedShard,
  kReplicate,
  kPartial,
  kDeviceMesh,
  kMeshLayout,
  // torch.distributed.checkpoint
  kMetadata,
  kTensorStorageMetadata,
  kBytesStorageMetadata,
  kTensorProperties,
  kChunkStorageMetadata,
  kMetadataIndex,
  kMemoryFormat,
  kStorageMeta,
  kStorageInfo,
  kSavePlan,
  kWriteItem,
  kWriteItemType,
  kTensorWriteData,
  kBytesWriteData,
  // Python and numpy
  kOrderedDict,
  kDefaultDict,
  kCounter,
  kDeque,
  kNamespace,
  kSimpleNamespace,
  kBytesIo,
  kSet,
  kFrozenSet,
  kBytes,
  kBytearray,
  kRange,
  kComplex,
  kSlice,
  kEncode,
  kPosixPath,
  kPurePosixPath,
  kWindowsPath,
  kPureWindowsPath,
  kArray,
  kArrayDtype,
  kReconstructArray,
  kArrayScalar,
  kArrayFromBuffer,
};

struct PickleNameInfo {
  PickleName name;
  // Whether what it makes has a state that BUILD sets, or items: an object that
  // is changed after it was made. Others are what they were made of.
  bool is_object;
  // kDtype and kStorage; kOtherDtype: what OtherDtypeName takes.
  Dtype dtype = Dtype::kU8;
};

// As torch calls it, without "torch."; empty where the list has no such dtype.
std::string_view TorchDtypeName(Dtype dtype);
// The same of a kOtherDtype.
std::string_view OtherDtypeName(Dtype number);

// nullopt: the list does not have it.
std::optional<PickleNameInfo> FindPickleName(std::string_view module,
                                             std::string_view name);

}  // namespace torch_ckpt

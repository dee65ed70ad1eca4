#include "format/torch/pickle_names.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace torch_ckpt {
namespace {

struct Row {
  std::string_view module, name;
  PickleNameInfo info;
};

constexpr PickleNameInfo Made(PickleName name) { return {name, false}; }
constexpr PickleNameInfo Object(PickleName name) { return {name, true}; }
constexpr PickleNameInfo OfDtype(Dtype dtype) {
  return {PickleName::kDtype, false, dtype};
}
constexpr PickleNameInfo StorageOf(Dtype dtype) {
  return {PickleName::kStorage, false, dtype};
}

// Which safetensors has no names for.
constexpr auto kOtherDtypes = std::to_array<std::string_view>(
    {"bits16",    "bits1x8", "bits2x4", "bits4x2", "bits8",    "complex128",
     "complex32", "int1",    "int2",    "int3",    "int4",     "int5",
     "int6",      "int7",    "qint32",  "qint8",   "quint2x4", "quint4x2",
     "quint8",    "uint1",   "uint2",   "uint3",   "uint4",    "uint5",
     "uint6",     "uint7"});
constexpr PickleNameInfo OtherDtype(std::string_view name) {
  const auto at = std::find(kOtherDtypes.begin(), kOtherDtypes.end(), name);
  return {PickleName::kOtherDtype, false,
          static_cast<Dtype>(at - kOtherDtypes.begin())};
}

constexpr std::string_view kDcp = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kOldDcp =
    "torch.distributed._shard.sharded_tensor.metadata";
constexpr std::string_view kDcpPlanner = "torch.distributed.checkpoint.planner";
constexpr std::string_view kPlacement =
    "torch.distributed.tensor.placement_types";
constexpr std::string_view kOldPlacement =
    "torch.distributed._tensor.placement_types";
constexpr std::string_view kSpec = "torch.distributed.tensor._dtensor_spec";
constexpr std::string_view kOldSpec = "torch.distributed._tensor._dtensor_spec";
constexpr std::string_view kMegatron =
    "megatron.core.dist_checkpointing.strategies.torch";
constexpr std::string_view kMesh = "torch.distributed.device_mesh";

using enum PickleName;

constexpr bool Before(const Row& a, const Row& b) {
  return std::tie(a.module, a.name) < std::tie(b.module, b.name);
}

template <size_t N>
constexpr std::array<Row, N> Sorted(std::array<Row, N> rows) {
  std::sort(rows.begin(), rows.end(), Before);
  return rows;
}

// Of torch 2.0 to 2.13, and numpy 1 and 2.
constexpr auto kRows = Sorted(std::to_array<Row>({
    {"__builtin__", "bytearray", Made(kBytearray)},
    {"__builtin__", "bytes", Made(kBytes)},
    {"__builtin__", "complex", Made(kComplex)},
    {"__builtin__", "frozenset", Made(kFrozenSet)},
    {"__builtin__", "set", Made(kSet)},
    {"__builtin__", "slice", Made(kSlice)},
    {"__builtin__", "xrange", Made(kRange)},
    {"_codecs", "encode", Made(kEncode)},
    {"_io", "BytesIO", Object(kBytesIo)},
    {"argparse", "Namespace", Object(kNamespace)},
    {"builtins", "bytearray", Made(kBytearray)},
    {"builtins", "bytes", Made(kBytes)},
    {"builtins", "complex", Made(kComplex)},
    {"builtins", "frozenset", Made(kFrozenSet)},
    {"builtins", "range", Made(kRange)},
    {"builtins", "set", Made(kSet)},
    {"builtins", "slice", Made(kSlice)},
    {"collections", "Counter", Made(kCounter)},
    {"collections", "OrderedDict", Object(kOrderedDict)},
    {"collections", "defaultdict", Object(kDefaultDict)},
    {"collections", "deque", Object(kDeque)},
    {kMegatron, "MCoreMetadata", Object(kMetadata)},
    {kMegatron, "MCoreSavePlan", Object(kSavePlan)},
    {"numpy", "dtype", Object(kArrayDtype)},
    {"numpy", "ndarray", Made(kArray)},
    {"numpy._core.multiarray", "_reconstruct", Object(kReconstructArray)},
    {"numpy._core.multiarray", "scalar", Made(kArrayScalar)},
    {"numpy.core.multiarray", "_reconstruct", Object(kReconstructArray)},
    {"numpy.core.multiarray", "scalar", Made(kArrayScalar)},
    {"numpy._core.numeric", "_frombuffer", Made(kArrayFromBuffer)},
    {"numpy.core.numeric", "_frombuffer", Made(kArrayFromBuffer)},
    {"pathlib", "PosixPath", Made(kPosixPath)},
    {"pathlib", "PurePosixPath", Made(kPurePosixPath)},
    {"pathlib", "PureWindowsPath", Made(kPureWindowsPath)},
    {"pathlib", "WindowsPath", Made(kWindowsPath)},
    {"pathlib._local", "PosixPath", Made(kPosixPath)},
    {"pathlib._local", "PurePosixPath", Made(kPurePosixPath)},
    {"pathlib._local", "PureWindowsPath", Made(kPureWindowsPath)},
    {"pathlib._local", "WindowsPath", Made(kWindowsPath)},
    {"torch", "BFloat16Storage", StorageOf(Dtype::kBF16)},
    {"torch", "BoolStorage", StorageOf(Dtype::kBool)},
    {"torch", "ByteStorage", StorageOf(Dtype::kU8)},
    {"torch", "CharStorage", StorageOf(Dtype::kI8)},
    {"torch", "ComplexFloatStorage", StorageOf(Dtype::kC64)},
    {"torch", "DoubleStorage", StorageOf(Dtype::kF64)},
    {"torch", "FloatStorage", StorageOf(Dtype::kF32)},
    {"torch", "HalfStorage", StorageOf(Dtype::kF16)},
    {"torch", "IntStorage", StorageOf(Dtype::kI32)},
    {"torch", "LongStorage", StorageOf(Dtype::kI64)},
    {"torch", "ShortStorage", StorageOf(Dtype::kI16)},
    {"torch", "Size", Made(kSize)},
    {"torch", "Tensor", Made(kTensor)},
    {"torch", "bfloat16", OfDtype(Dtype::kBF16)},
    {"torch", "bits16", OtherDtype("bits16")},
    {"torch", "bits1x8", OtherDtype("bits1x8")},
    {"torch", "bits2x4", OtherDtype("bits2x4")},
    {"torch", "bits4x2", OtherDtype("bits4x2")},
    {"torch", "bits8", OtherDtype("bits8")},
    {"torch", "complex128", OtherDtype("complex128")},
    {"torch", "complex32", OtherDtype("complex32")},
    {"torch", "int1", OtherDtype("int1")},
    {"torch", "int2", OtherDtype("int2")},
    {"torch", "int3", OtherDtype("int3")},
    {"torch", "int4", OtherDtype("int4")},
    {"torch", "int5", OtherDtype("int5")},
    {"torch", "int6", OtherDtype("int6")},
    {"torch", "int7", OtherDtype("int7")},
    {"torch", "qint32", OtherDtype("qint32")},
    {"torch", "qint8", OtherDtype("qint8")},
    {"torch", "quint2x4", OtherDtype("quint2x4")},
    {"torch", "quint4x2", OtherDtype("quint4x2")},
    {"torch", "quint8", OtherDtype("quint8")},
    {"torch", "uint1", OtherDtype("uint1")},
    {"torch", "uint2", OtherDtype("uint2")},
    {"torch", "uint3", OtherDtype("uint3")},
    {"torch", "uint4", OtherDtype("uint4")},
    {"torch", "uint5", OtherDtype("uint5")},
    {"torch", "uint6", OtherDtype("uint6")},
    {"torch", "uint7", OtherDtype("uint7")},
    {"torch", "bool", OfDtype(Dtype::kBool)},
    {"torch", "complex64", OfDtype(Dtype::kC64)},
    {"torch", "device", Made(kDevice)},
    {"torch", "float16", OfDtype(Dtype::kF16)},
    {"torch", "float32", OfDtype(Dtype::kF32)},
    {"torch", "float4_e2m1fn_x2", OfDtype(Dtype::kF4)},
    {"torch", "float64", OfDtype(Dtype::kF64)},
    {"torch", "float8_e4m3fn", OfDtype(Dtype::kF8E4M3)},
    {"torch", "float8_e4m3fnuz", OfDtype(Dtype::kF8E4M3Fnuz)},
    {"torch", "float8_e5m2", OfDtype(Dtype::kF8E5M2)},
    {"torch", "float8_e5m2fnuz", OfDtype(Dtype::kF8E5M2Fnuz)},
    {"torch", "float8_e8m0fnu", OfDtype(Dtype::kF8E8M0)},
    {"torch", "int16", OfDtype(Dtype::kI16)},
    {"torch", "int32", OfDtype(Dtype::kI32)},
    {"torch", "int64", OfDtype(Dtype::kI64)},
    {"torch", "int8", OfDtype(Dtype::kI8)},
    {"torch", "uint16", OfDtype(Dtype::kU16)},
    {"torch", "uint32", OfDtype(Dtype::kU32)},
    {"torch", "uint64", OfDtype(Dtype::kU64)},
    {"torch", "uint8", OfDtype(Dtype::kU8)},
    {"torch._C", "Generator", Object(kGenerator)},
    {"torch._tensor", "_rebuild_from_type_v2", Made(kRebuildFromType)},
    {"torch._utils", "_rebuild_parameter", Made(kRebuildParameter)},
    {"torch._utils", "_rebuild_parameter_with_state",
     Made(kRebuildParameterWithState)},
    {"torch._utils", "_rebuild_tensor_v2", Made(kRebuildTensor)},
    {"torch._utils", "_rebuild_tensor_v3", Made(kRebuildTensorV3)},
    {"torch._utils", "_rebuild_wrapper_subclass",
     Made(kRebuildWrapperSubclass)},
    {"torch.distributed._mesh_layout", "_FlatLayout", Object(kMeshLayout)},
    {"torch.distributed._mesh_layout", "_MeshLayout", Object(kMeshLayout)},
    {kOldDcp, "MEM_FORMAT_ENCODING", Made(kMemoryFormat)},
    {kOldDcp, "TensorProperties", Object(kTensorProperties)},
    {"torch.distributed._tensor", "DTensor", Made(kDTensor)},
    {"torch.distributed._tensor.api", "DTensor", Made(kDTensor)},
    {kOldSpec, "DTensorSpec", Object(kDTensorSpec)},
    {kOldSpec, "TensorMeta", Object(kTensorMeta)},
    {kOldPlacement, "DTensorSpec", Object(kDTensorSpec)},
    {kOldPlacement, "Partial", Object(kPartial)},
    {kOldPlacement, "Replicate", Object(kReplicate)},
    {kOldPlacement, "Shard", Object(kShard)},
    {kOldPlacement, "TensorMeta", Object(kTensorMeta)},
    {kOldPlacement, "_Partial", Object(kPartial)},
    {kOldPlacement, "_StridedShard", Object(kStridedShard)},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo",
     Object(kStorageInfo)},
    {kDcp, "BytesStorageMetadata", Object(kBytesStorageMetadata)},
    {kDcp, "ChunkStorageMetadata", Object(kChunkStorageMetadata)},
    {kDcp, "Metadata", Object(kMetadata)},
    {kDcp, "MetadataIndex", Object(kMetadataIndex)},
    {kDcp, "StorageMeta", Object(kStorageMeta)},
    {kDcp, "TensorProperties", Object(kTensorProperties)},
    {kDcp, "TensorStorageMetadata", Object(kTensorStorageMetadata)},
    {kDcp, "_MEM_FORMAT_ENCODING", Made(kMemoryFormat)},
    {kDcpPlanner, "BytesIOWriteData", Object(kBytesWriteData)},
    {kDcpPlanner, "SavePlan", Object(kSavePlan)},
    {kDcpPlanner, "TensorWriteData", Object(kTensorWriteData)},
    {kDcpPlanner, "WriteItem", Object(kWriteItem)},
    {kDcpPlanner, "WriteItemType", Made(kWriteItemType)},
    {kMesh, "DeviceMesh", Object(kDeviceMesh)},
    {"torch.distributed.tensor", "DTensor", Made(kDTensor)},
    {kSpec, "DTensorSpec", Object(kDTensorSpec)},
    {kSpec, "ShardOrderEntry", Object(kShardOrderEntry)},
    {kSpec, "TensorMeta", Object(kTensorMeta)},
    {"torch.distributed.tensor.api", "DTensor", Made(kDTensor)},
    {kPlacement, "Partial", Object(kPartial)},
    {kPlacement, "Replicate", Object(kReplicate)},
    {kPlacement, "Shard", Object(kShard)},
    {kPlacement, "_StridedShard", Object(kStridedShard)},
    {"torch.nn.parameter", "Parameter", Made(kParameter)},
    {"torch.serialization", "_get_layout", Made(kLayout)},
    {"torch.storage", "UntypedStorage", Made(kUntypedStorage)},
    {"types", "SimpleNamespace", Object(kSimpleNamespace)},
}));

}  // namespace

std::string_view TorchDtypeName(Dtype dtype) {
  for (const Row& row : kRows) {
    if (row.info.name == kDtype && row.info.dtype == dtype) return row.name;
  }
  return {};
}

std::string_view OtherDtypeName(Dtype number) {
  const auto at = static_cast<size_t>(number);
  return at < kOtherDtypes.size() ? kOtherDtypes[at] : std::string_view();
}

std::optional<PickleNameInfo> FindPickleName(std::string_view module,
                                             std::string_view name) {
  const Row wanted{module, name, {}};
  const auto at = std::lower_bound(kRows.begin(), kRows.end(), wanted, Before);
  if (at == kRows.end() || Before(wanted, *at)) return std::nullopt;
  return at->info;
}

}  // namespace torch_ckpt

package kvevents

import "github.com/tinylib/msgp/msgp"

// Append encodes a batch as vLLM does since mid-2026: [time, events, rank],
// each event a map with its type. Hashes are integers. Extra is left out: only
// its hash is known.
func Append(dst []byte, batch *Batch) []byte {
	dst = msgp.AppendArrayHeader(dst, 3)
	dst = msgp.AppendFloat64(dst, batch.Time)
	dst = msgp.AppendArrayHeader(dst, uint32(len(batch.Events)))
	for i := range batch.Events {
		dst = batch.Events[i].append(dst)
	}
	return msgp.AppendUint64(dst, uint64(batch.Rank))
}

// AppendArrays encodes a batch with events as lists, as vLLM did before, and
// SGLang.
func AppendArrays(dst []byte, batch *Batch) []byte {
	dst = msgp.AppendArrayHeader(dst, 3)
	dst = msgp.AppendFloat64(dst, batch.Time)
	dst = msgp.AppendArrayHeader(dst, uint32(len(batch.Events)))
	for i := range batch.Events {
		ev := &batch.Events[i]
		switch ev.Kind {
		case Cleared:
			dst = msgp.AppendString(msgp.AppendArrayHeader(dst, 1), "AllBlocksCleared")
		case Removed:
			dst = msgp.AppendString(msgp.AppendArrayHeader(dst, 3), "BlockRemoved")
			dst = msgp.AppendString(appendHashes(dst, ev.Hashes), mediums[ev.Tier])
		default:
			dst = msgp.AppendString(msgp.AppendArrayHeader(dst, 7), "BlockStored")
			dst = appendHashes(dst, ev.Hashes)
			dst = ev.appendParent(dst)
			dst = appendTokens(dst, ev.Tokens)
			dst = msgp.AppendNil(msgp.AppendUint64(dst, uint64(ev.BlockSize)))
			dst = msgp.AppendString(dst, mediums[ev.Tier])
		}
	}
	return msgp.AppendUint64(dst, uint64(batch.Rank))
}

var mediums = [Tiers]string{"GPU", "CPU", "STORAGE"}

func (ev *Event) append(dst []byte) []byte {
	switch ev.Kind {
	case Cleared:
		return msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 1), "type"), "AllBlocksCleared")
	case Removed:
		dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 4), "type"), "BlockRemoved")
		dst = appendHashes(msgp.AppendString(dst, "block_hashes"), ev.Hashes)
	default:
		dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 8), "type"), "BlockStored")
		dst = appendHashes(msgp.AppendString(dst, "block_hashes"), ev.Hashes)
		dst = ev.appendParent(msgp.AppendString(dst, "parent_block_hash"))
		dst = appendTokens(msgp.AppendString(dst, "token_ids"), ev.Tokens)
		dst = msgp.AppendUint64(msgp.AppendString(dst, "block_size"), uint64(ev.BlockSize))
		dst = msgp.AppendString(dst, "lora_name")
		if ev.LoRA == "" {
			dst = msgp.AppendNil(dst)
		} else {
			dst = msgp.AppendString(dst, ev.LoRA)
		}
	}
	dst = msgp.AppendString(msgp.AppendString(dst, "medium"), mediums[ev.Tier])
	return msgp.AppendUint64(msgp.AppendString(dst, "group_idx"), uint64(ev.Group))
}

func (ev *Event) appendParent(dst []byte) []byte {
	if !ev.HasParent {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendUint64(dst, ev.Parent)
}

func appendHashes(dst []byte, hashes []uint64) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(hashes)))
	for _, h := range hashes {
		dst = msgp.AppendUint64(dst, h)
	}
	return dst
}

func appendTokens(dst []byte, tokens []uint32) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(tokens)))
	for _, t := range tokens {
		dst = msgp.AppendUint64(dst, uint64(t))
	}
	return dst
}

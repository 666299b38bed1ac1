package kvevents

// Append encodes a batch as vLLM does since mid-2026: [time, events, rank],
// each event a map with its type. Hashes are integers. Extra is left out: only
// its hash is known.
func Append(dst []byte, batch *Batch) []byte {
	dst = appendList(dst, 3)
	dst = appendFloat(dst, batch.Time)
	dst = appendList(dst, len(batch.Events))
	for i := range batch.Events {
		dst = batch.Events[i].append(dst)
	}
	return appendUint(dst, uint64(batch.Rank))
}

// AppendArrays encodes a batch with events as lists, as vLLM did before, and
// SGLang.
func AppendArrays(dst []byte, batch *Batch) []byte {
	dst = appendList(dst, 3)
	dst = appendFloat(dst, batch.Time)
	dst = appendList(dst, len(batch.Events))
	for i := range batch.Events {
		ev := &batch.Events[i]
		switch ev.Kind {
		case Cleared:
			dst = appendText(appendList(dst, 1), "AllBlocksCleared")
		case Removed:
			dst = appendText(appendList(dst, 3), "BlockRemoved")
			dst = appendText(appendHashes(dst, ev.Hashes), mediums[ev.Tier])
		default:
			dst = appendText(appendList(dst, 7), "BlockStored")
			dst = appendHashes(dst, ev.Hashes)
			dst = ev.appendParent(dst)
			dst = appendTokens(dst, ev.Tokens)
			dst = appendNil(appendUint(dst, uint64(ev.BlockSize)))
			dst = appendText(dst, mediums[ev.Tier])
		}
	}
	return appendUint(dst, uint64(batch.Rank))
}

var mediums = [Tiers]string{"GPU", "CPU", "STORAGE"}

func (ev *Event) append(dst []byte) []byte {
	switch ev.Kind {
	case Cleared:
		return appendText(appendText(appendMap(dst, 1), "type"), "AllBlocksCleared")
	case Removed:
		dst = appendText(appendText(appendMap(dst, 4), "type"), "BlockRemoved")
		dst = appendHashes(appendText(dst, "block_hashes"), ev.Hashes)
	default:
		dst = appendText(appendText(appendMap(dst, 8), "type"), "BlockStored")
		dst = appendHashes(appendText(dst, "block_hashes"), ev.Hashes)
		dst = ev.appendParent(appendText(dst, "parent_block_hash"))
		dst = appendTokens(appendText(dst, "token_ids"), ev.Tokens)
		dst = appendUint(appendText(dst, "block_size"), uint64(ev.BlockSize))
		dst = appendText(dst, "lora_name")
		if ev.LoRA == "" {
			dst = appendNil(dst)
		} else {
			dst = appendText(dst, ev.LoRA)
		}
	}
	dst = appendText(appendText(dst, "medium"), mediums[ev.Tier])
	return appendUint(appendText(dst, "group_idx"), uint64(ev.Group))
}

func (ev *Event) appendParent(dst []byte) []byte {
	if !ev.HasParent {
		return appendNil(dst)
	}
	return appendUint(dst, ev.Parent)
}

func appendHashes(dst []byte, hashes []uint64) []byte {
	dst = appendList(dst, len(hashes))
	for _, h := range hashes {
		dst = appendUint(dst, h)
	}
	return dst
}

func appendTokens(dst []byte, tokens []uint32) []byte {
	dst = appendList(dst, len(tokens))
	for _, t := range tokens {
		dst = appendUint(dst, uint64(t))
	}
	return dst
}

"""Words and whole sentences for the sentiment task, each on its side."""

THINGS = (
    "film|movie|book|meal|food|hotel|room|service|phone|game|concert|play|show|lesson|trip|day|party|coffee|soup|"
    "pizza|cake|restaurant|song|album|story|ending|plot|acting|music|weather|staff|waiter|driver|teacher|doctor|shop|"
    "app|website|laptop|camera|battery|screen|sound|bed|view|beach|holiday|flight|journey|match|performance|novel|"
    "series|episode|present|jacket|shirt|chair|sofa|car|bike|bus|train|garden|museum|exhibition|course|job|team|"
    "support|delivery|product|price|quality|experience|evening|weekend|dinner|breakfast|lunch|bread|wine|tea|dessert|"
    "steak|burger|salad|visit|tour|guide|city|neighbourhood|house|kitchen|update|software|keyboard|headset|idea|talk"
).split("|")

GOOD_ADJECTIVES = (
    "good|great|wonderful|excellent|amazing|fantastic|lovely|brilliant|superb|perfect|delightful|beautiful|awesome|"
    "charming|enjoyable|impressive|outstanding|pleasant|nice|terrific|marvellous|magnificent|fabulous|splendid|"
    "incredible|delicious|tasty|funny|fun|exciting|interesting|fascinating|inspiring|comfortable|friendly|helpful|"
    "clean|fresh|fast|reliable|smooth|touching|moving|clever|kind|polite|cosy|stunning|gorgeous|remarkable|"
    "exceptional|first-class|top|flawless|thrilling|heart-warming|relaxing|elegant|refreshing|satisfying|cheerful|"
    "magical|unforgettable|spectacular|warm|generous|sweet|entertaining|thoughtful|worthwhile|fine|solid|super"
).split("|")

BAD_ADJECTIVES = (
    "bad|terrible|awful|horrible|poor|boring|dreadful|disappointing|disgusting|ugly|dull|annoying|useless|nasty|"
    "stupid|slow|dirty|broken|rude|cold|stale|bland|tasteless|unpleasant|painful|weak|cheap|noisy|ridiculous|lousy|"
    "miserable|pathetic|mediocre|unbearable|atrocious|appalling|worthless|messy|confusing|tedious|frustrating|"
    "depressing|sad|gross|unfriendly|unhelpful|unreliable|uncomfortable|overpriced|clumsy|shabby|smelly|soggy|burnt|"
    "salty|lifeless|predictable|pointless|forgettable|irritating|horrid|inedible|faulty|defective|disastrous|"
    "shameful|sloppy|dishonest|careless|hopeless|lame|ghastly|abysmal|second-rate|tiresome|rotten|the worst"
).split("|")

GOOD_VERBS = "loved|enjoyed|liked|adored|really liked|really enjoyed|truly loved|appreciated|was impressed by|am happy with|recommend|love|like|enjoy|was delighted by|am pleased with".split(
    "|"
)
BAD_VERBS = "hated|disliked|regretted|despised|could not stand|did not like|did not enjoy|was disappointed by|am unhappy with|hate|dislike|regret|was bored by|got angry about|cannot recommend|do not like|was annoyed by".split(
    "|"
)

GOOD_SENTENCES = (
    "I would buy it again at once.|Highly recommended!|I cannot wait to come back.|It made my day.|I laughed from start to finish.|"
    "Best purchase I ever made.|It works like a dream.|I am so happy with it.|Everyone was kind to us.|We had a great time.|"
    "I smiled the whole evening.|Five stars from me.|Worth every penny.|It exceeded my expectations.|I could watch it again and again.|"
    "They solved my problem at once.|What a joy!|My children loved it.|I am in love with it.|Thank you for this gem.|"
    "I have never eaten better.|It arrived early and works well.|Nothing could be better.|A real masterpiece.|Well done!|"
    "We will surely come again.|It is exactly what I wanted.|I feel great today.|This is a treat.|The best day of my life.|"
    "They treated us like family.|I was moved to tears of joy.|It could not have gone better.|I am very satisfied.|Two thumbs up.|"
    "We felt at home.|I slept like a baby.|It never lets me down.|A pleasure from beginning to end.|I won and I am thrilled.|"
    "No complaints at all.|I had no problems with it.|You will not regret it.|It saved me a lot of time.|Simply the best.|"
    "The crowd cheered and so did I.|I am grateful for the help.|It brightened my week.|I would give it ten out of ten.|Good job!"
).split("|")
BAD_SENTENCES = (
    "I want my money back.|Never again!|I would not recommend it to anyone.|It broke after one day.|What a waste of time.|"
    "I fell asleep in the middle.|Nobody helped us.|It made me sick.|I left before the end.|Worst purchase I ever made.|"
    "One star is too much.|It stopped working at once.|They ignored us for an hour.|I am so disappointed.|We will not come back.|"
    "Not worth the price.|It ruined my evening.|I was bored to tears.|Nothing worked.|A complete disaster.|"
    "Stay away from it.|I regret buying it.|It was far too expensive.|They lied to me.|My order never arrived.|"
    "It arrived late and damaged.|I had a headache from the noise.|I feel awful today.|The worst day of my life.|Save your money.|"
    "I could not finish it.|It crashed again and again.|I waited two hours for nothing.|They were rude to my mother.|Two thumbs down.|"
    "It let me down.|It fell apart in my hands.|I sent it back.|A pain from beginning to end.|I lost and I am furious.|"
    "Nothing but problems.|It has many faults.|You will regret it.|It cost me a lot of time.|Simply the worst.|"
    "I asked for a refund.|I am angry about the delay.|It spoiled my week.|I would give it zero out of ten.|Shame on you!"
).split("|")

# Written by hand for evaluation: neither the sentences nor their patterns come from the lists above.
UNSEEN_GOOD = (
    "This is the nicest cafe in town and the owner is lovely.|We enjoyed every minute of the tour.|Such a beautiful story, I was touched.|"
    "The new phone is fast and the screen looks amazing.|I am happy that I bought this car.|Our waiter was friendly and quick.|"
    "What a brilliant idea!|My wife loved the present.|The soup tasted wonderful.|A fantastic book that I will read again.|"
    "The doctor was very kind and helpful.|I had a perfect day at the beach.|The music was excellent and the band was fun.|"
    "Really good value, I recommend it.|It is a pleasure to use this app.|The kids had so much fun.|I love the way it sounds.|"
    "The hotel was clean and the bed was comfortable.|Great acting and a clever plot.|Everything went smoothly and I am delighted.|"
    "The teacher made the course interesting.|That was an impressive performance.|Our room had a stunning view.|Best pizza ever!|"
    "I like this song a lot."
).split("|")
UNSEEN_BAD = (
    "This is the dirtiest cafe in town and the owner is rude.|We regretted every minute of the tour.|Such a boring story, I fell asleep.|"
    "The new phone is slow and the screen broke.|I am sad that I bought this car.|Our waiter was unfriendly and slow.|"
    "What a stupid idea!|My wife hated the present.|The soup tasted awful.|A terrible book that I will never read again.|"
    "The doctor was very rude and unhelpful.|I had a horrible day at the beach.|The music was dreadful and the band was dull.|"
    "Really bad value, I want my money back.|It is a pain to use this app.|The kids were bored.|I hate the way it sounds.|"
    "The hotel was dirty and the bed was uncomfortable.|Bad acting and a predictable plot.|Everything went wrong and I am angry.|"
    "The teacher made the course boring.|That was a disappointing performance.|Our room was noisy and smelly.|Worst pizza ever!|"
    "I do not like this song at all."
).split("|")
